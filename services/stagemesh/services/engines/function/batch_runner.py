"""Runs the waiting calls of all requests on the function's thread, in batches. If a batch fails, its calls run again,
one by one.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from typing import NamedTuple, TypeAlias

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.connectors.packets import Packet, is_list, packets_problem
from stagemesh.services.engines.function.base import Call, Function
from stagemesh.services.engines.function.playout import CallQueue
from stagemesh.services.engines.user_errors import UserCode

_log = logging.getLogger(__name__)

Outcome: TypeAlias = Sequence[Packet] | StagemeshError
"""The function's output packets for one call, or the error of the call."""


def run_calls(function: Function[object], code: UserCode, calls: Sequence[Call[object]]) -> Sequence[Outcome]:
    """Calls a function with a batch, and one call at a time if the function rejects the batch.

    Returns the outcome of each call. An exception of the function fails only the request that caused it.
    """
    try:
        made = function(calls)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  # user code raises any exception
        if len(calls) > 1:
            return [run_calls(function, code, [call])[0] for call in calls]
        return [code.to_stagemesh_error(exc)]
    if problem := _result_problem(made, calls=len(calls)):
        error = code.invalid_result(problem, wanted="a list with one list of Packets for each call")
        return [copy(error) for _ in calls]
    return made


def _result_problem(made: object, *, calls: int) -> str:
    """Returns what is wrong with the type of a function's result, or "" if it is a list of packets for each call."""
    if not is_list(made):
        return type(made).__name__
    if len(made) != calls:
        return f"{len(made)} results for {calls} calls"
    return next((f"{problem} for a call" for problem in map(packets_problem, made) if problem), "")


class WaitingCall(NamedTuple):
    """A call that waits or runs."""

    call: Call[object]
    done: asyncio.Future[Sequence[Packet]]
    trace: StepTrace | None


class CallRunner:
    """Passes waiting calls to the function, a batch at a time.

    The thread takes the next batch itself, because an event loop would start the batch a third of a millisecond later.
    After each batch, the thread first does its other waiting work, such as opening the state of a request. Create the
    runner within a running event loop, on which all methods are called.
    """

    def __init__(
        self,
        name: str,
        thread: ThreadPoolExecutor,
        compute: Callable[[Sequence[Call[object]]], Sequence[Outcome]],
        *,
        max_batch: int,
        on_done: Callable[[Sequence[WaitingCall], Sequence[Outcome], float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates a runner without calls.

        Args:
            name: The function's name.
            thread: The function's thread.
            compute: Called on the thread with a batch. Returns the outcome of each call.
            max_batch: The maximum number of calls in a batch.
            on_done: Called on the event loop with each batch that has run, the outcomes, and the seconds that it took.
            clock: The monotonic clock, in seconds.
        """
        self._name, self._thread, self._compute, self._max_batch = name, thread, compute, max_batch
        self._on_done, self._clock = on_done, clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Protects the queue, the running batch and `_has_turn`, which the event loop and the thread both change."""
        self._queue = CallQueue[WaitingCall]()
        self._running: list[WaitingCall] = []
        """The calls of the batch that runs. Empty if none runs."""
        self._has_turn = False
        """Whether the thread runs a batch, or will look for one."""
        self._is_closed = False
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """A future that completes when the thread runs no further batches because of a defect of Stagemesh."""

    def __len__(self) -> int:
        """Returns the number of calls that wait."""
        return len(self._queue)

    def add(self, waiting: WaitingCall, *, shape: Hashable, due_s: float) -> None:
        """Adds a call that is due at the time `due_s`, and that may share a batch with others of an equal `shape`.

        Raises UnavailableError if the runner is closed.
        """
        if self._is_closed:
            raise self._closed_error()
        with self._lock:
            self._queue.add(waiting, shape=shape, due_s=due_s)
            begins, self._has_turn = not self._has_turn, True
        if begins:
            # Calls that arrive in the same iteration of the event loop share the batch.
            self._loop.call_soon(self._ask_for_turn)

    def close(self) -> None:
        """Ends all calls with UnavailableError. The result of a batch that runs is discarded. Idempotent."""
        self._is_closed = True
        with self._lock:
            running, waiting = list(self._running), list[WaitingCall]()
            while self._queue:
                waiting += self._queue.pop_batch(self._max_batch)
        for each in running:
            _set_outcome(each, self._closed_error(" while it ran"))
        for each in waiting:
            _set_outcome(each, self._closed_error())

    # -- inner workings

    def _ask_for_turn(self) -> None:
        with suppress(RuntimeError):  # The thread is shut down.
            self._thread.submit(self._take_turn)

    def _take_turn(self) -> None:
        """Runs the next batch on the thread."""
        try:
            if self._run_batch():
                self._ask_for_turn()
        except BaseException:  # noqa: BLE001  # otherwise the waiting calls would never end
            _log.exception("function %s: a batch of calls has no outcomes", self._name)
            self._report(self._fail)

    def _run_batch(self) -> bool:
        """Runs a batch. Returns False if no call waits.

        The frame of this method must not outlive the batch, which retains packets and their leases.
        """
        with self._lock:
            batch = self._running = self._next_batch()
            self._has_turn = bool(batch)
        if not batch:
            return False
        began_s = self._clock()
        outcomes = self._compute([waiting.call for waiting in batch])
        took_s = self._clock() - began_s
        with self._lock:
            self._running = []
        self._report(self._deliver, batch, outcomes, took_s)
        return True

    def _next_batch(self) -> list[WaitingCall]:
        """Removes the next batch from the queue, without cancelled calls. Returns an empty list if no call waits."""
        while self._queue:
            batch = [each for each in self._queue.pop_batch(self._max_batch) if not each.done.cancelled()]
            if batch:
                return batch
        return []

    def _report(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # The event loop is closed.
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _deliver(self, batch: Sequence[WaitingCall], outcomes: Sequence[Outcome], took_s: float) -> None:
        try:
            self._on_done(batch, outcomes, took_s)
        finally:
            for waiting, outcome in zip(batch, outcomes, strict=True):
                _set_outcome(waiting, outcome)

    def _fail(self) -> None:
        self.close()
        if not self.failed.done():
            self.failed.set_result(None)

    def _closed_error(self, when: str = "") -> UnavailableError:
        return UnavailableError(f"function {self._name} was closed{when}", reason="SHUTTING_DOWN")


def _set_outcome(waiting: WaitingCall, outcome: Outcome) -> None:
    if waiting.done.done():
        return
    if isinstance(outcome, StagemeshError):
        waiting.done.set_exception(outcome)
    else:
        waiting.done.set_result(outcome)
