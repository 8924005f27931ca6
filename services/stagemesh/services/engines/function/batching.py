"""Batches the waiting calls of all requests and runs the function on each batch, on one thread."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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


class Batcher:
    """Passes calls to a function in arrival order, at most `max_batch` at a time.

    A request has at most one waiting call, because it awaits each call before it makes the next call.
    """

    def __init__(self, function: Function[object], *, name: str, thread: ThreadPoolExecutor, max_batch: int) -> None:
        self._function = function
        self._name = name
        self._thread = thread
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._call_s = 0.0
        """The time per call in seconds, as an exponentially weighted moving average."""
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of calls that wait to be run."""
        return len(self._waiting)

    @property
    def work_s(self) -> float:
        """The estimated time to run the waiting calls, in seconds."""
        return len(self._waiting) * self._call_s

    async def call(self, call: Call[object]) -> Sequence[Packet]:
        """Waits for a call to be run. Returns the function's output packets.

        Cancellation drops a waiting call. If the call has started, cancellation drops its result.
        """
        if self._closed:
            raise UnavailableError(f"function {self._name} is closed")
        waiting = _Waiting(call, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.done

    async def run(self) -> None:
        """Runs waiting calls until cancelled. Calls that are then still waiting fail with UnavailableError."""
        try:
            while True:
                await self._arrived.wait()
                await self._serve(self._take())
        finally:
            self._closed = True
            for waiting in self._waiting:
                _set_outcome(waiting, UnavailableError(f"function {self._name} is closed"))

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
            call_s = (time.monotonic() - began_s) / len(batch)
            self._call_s += (call_s - self._call_s) * (_EWMA_WEIGHT if self._call_s else 1.0)
        finally:
            for waiting, outcome in zip(batch, outcomes, strict=True):
                _set_outcome(waiting, outcome)

    def _compute(self, calls: Sequence[Call[object]]) -> Sequence[Sequence[Packet] | StagemeshError]:
        try:
            made = self._function(calls)
        except Exception as exc:  # noqa: BLE001  # user code: any exception fails only its own request
            if len(calls) == 1:
                return [self._to_error(exc)]
            return [self._compute([call])[0] for call in calls]
        if len(made) != len(calls):
            error = InternalError(f"function {self._name} returned {len(made)} results for {len(calls)} calls")
            return [error] * len(calls)
        return made

    def _to_error(self, exc: Exception) -> StagemeshError:
        if isinstance(exc, StagemeshError):
            return exc
        _logger.error("function %s raised", self._name, exc_info=exc)
        return InternalError(
            f"function {self._name} raised {type(exc).__name__}; the log of this stage has the traceback",
            reason="FUNCTION_RAISED",
            metadata={"function": self._name},
        )


def _set_outcome(waiting: _Waiting, outcome: Sequence[Packet] | StagemeshError) -> None:
    if waiting.done.done():
        return
    if isinstance(outcome, StagemeshError):
        waiting.done.set_exception(outcome)
    else:
        waiting.done.set_result(outcome)
