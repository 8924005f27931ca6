"""Runs a function in its one thread on whatever calls are ready, so that many requests share a batch."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from stagemesh.common.errors import InternalError, StagemeshError, UnavailableError
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.function.base import Call, Function

_logger = logging.getLogger(__name__)
_EWMA_WEIGHT = 0.2

Result = TypeVar("Result")


class _Waiting(NamedTuple):
    call: Call[object]
    done: asyncio.Future[Sequence[Packet]]


@dataclass
class _Pace:
    """Seconds a call takes, averaged with more weight on the latest."""

    call_s: float = 0.0

    def add(self, call_s: float) -> None:
        self.call_s += (call_s - self.call_s) * (_EWMA_WEIGHT if self.call_s else 1.0)


class Batcher:
    """Hands calls to a function, at most `max_batch` at a time and in the order they came.

    A request has at most one call in it, since whoever makes the next waits for the last.
    """

    def __init__(self, function: Function[object], *, name: str, thread: ThreadPoolExecutor, max_batch: int) -> None:
        self._function = function
        self._name = name
        self._thread = thread
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._pace = _Pace()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Calls not begun."""
        return len(self._waiting)

    @property
    def work_s(self) -> float:
        """Seconds that the waiting calls should take."""
        return len(self._waiting) * self._pace.call_s

    async def call(self, call: Call[object]) -> Sequence[Packet]:
        """What the function makes of a call. Cancelling drops the call, or its result where it has begun."""
        if self._closed:
            raise UnavailableError(f"function {self._name} is closed")
        waiting = _Waiting(call, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.done

    async def run(self) -> None:
        """Serves calls until it is cancelled; those still waiting then fail."""
        try:
            while True:
                await self._arrived.wait()
                await self._serve(self._take())
        finally:
            self._closed = True
            for waiting in self._waiting:
                _settle(waiting, UnavailableError(f"function {self._name} is closed"))

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if not waiting.done.cancelled():
                batch.append(waiting)
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _serve(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        calls = [waiting.call for waiting in batch]
        outcomes: Sequence[Sequence[Packet] | StagemeshError] = [
            UnavailableError(f"function {self._name} was closed while it ran")
        ] * len(calls)
        began_s = time.monotonic()
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, calls)
            self._pace.add((time.monotonic() - began_s) / len(batch))
        finally:
            for waiting, outcome in zip(batch, outcomes, strict=True):
                _settle(waiting, outcome)

    def _compute(self, calls: Sequence[Call[object]]) -> Sequence[Sequence[Packet] | StagemeshError]:
        try:
            made = self._function(calls)
        except Exception as exc:  # noqa: BLE001  # the function is a user's: whatever it raises ends its request only
            if len(calls) == 1:
                return [self._blame(exc)]
            return [self._compute([call])[0] for call in calls]
        if len(made) != len(calls):
            error = InternalError(f"function {self._name} gave {len(made)} results for {len(calls)} calls")
            return [error] * len(calls)
        return made

    def _blame(self, exc: Exception) -> StagemeshError:
        if isinstance(exc, StagemeshError):
            return exc
        _logger.error("function %s raised", self._name, exc_info=exc)
        return InternalError(
            f"function {self._name} raised {type(exc).__name__}; the log of this stage has the traceback",
            reason="FUNCTION_RAISED",
            metadata={"function": self._name},
        )


def _settle(waiting: _Waiting, outcome: Sequence[Packet] | StagemeshError) -> None:
    if waiting.done.done():
        return
    if isinstance(outcome, StagemeshError):
        waiting.done.set_exception(outcome)
    else:
        waiting.done.set_result(outcome)
