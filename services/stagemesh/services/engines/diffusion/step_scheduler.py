"""The scheduler of denoising steps, and the loop that runs them. Each step is shared by a batch of requests."""

import asyncio
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.services.engines.calls import EngineCalls
from stagemesh.services.engines.diffusion.executor import Executor

_MAX_TOKENS_RATIO = 2
"""Maximum ratio of the token counts of two requests that share a step."""
_MAX_STEPS_RATIO = 3
"""Maximum ratio of the remaining steps of a request to the remaining steps of the batch's first request."""
_WORTHWHILE_RATIO = 0.97
_MIN_MEASUREMENTS = 2
_KEPT_MEASUREMENTS = 16
_MAX_KEYS = 1024
_arrivals = itertools.count()


@dataclass(eq=False)
class RequestProgress:
    """The scheduling data of a request and the number of its completed steps."""

    request_id: str
    key: Hashable
    """Compatibility key. Only requests with equal keys can share a step."""
    tokens: int
    """Number of tokens that the request adds to a forward pass."""
    total_steps: int
    done: int = 0
    """Number of completed steps."""
    priority: int = 0
    """Priority of the request. Requests with a higher number run first."""
    deadline_s: float | None = None
    """Deadline in seconds, on the same clock as the `now_s` of `StepScheduler.next_batch`. None if the request has no
    deadline."""
    stop_at: int = 0
    """Number of completed steps at which the request leaves the step loop."""
    error: StagemeshError | None = None
    """Error that ends the request: that of its latest step, or of the step loop. None if the request continues."""
    reported: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that the step loop sets after each step of the request, and when it ends."""
    trace: StepTrace | None = None
    """The spans of the request's step of the stage, or None if the request is not traced."""
    waited: int = 0
    """Number of steps that other requests have run since this request's latest step."""
    arrival: int = field(default_factory=lambda: next(_arrivals))

    @property
    def steps_left(self) -> int:
        """Number of remaining steps."""
        return self.total_steps - self.done


class StepScheduler:
    """Selects the requests of the next step by priority, then by the fewest remaining steps, without starvation.

    Short requests run first, because they delay long requests only a little. There are two exceptions. A request that
    has waited for `max_wait_steps` steps takes precedence over all other requests. After such requests, a request that
    would otherwise miss its deadline takes precedence.

    Requests with similar numbers of tokens share a step if sharing lowers the time per request. The numbers must be
    similar, because all rows of a forward pass are padded to the longest row.

    Thread-safe, because the thread that computes the steps selects and records them.
    """

    def __init__(self, *, max_wait_steps: int, max_batch: int) -> None:
        self.step_s = 0.0
        """Moving average of the duration of a step, in seconds. 0 until the first step has completed."""
        self._max_wait_steps = max_wait_steps
        self._sizes = BatchSizes(max_batch)
        self._requests: set[RequestProgress] = set()
        self._lock = Lock()

    @property
    def requests(self) -> list[RequestProgress]:
        """All requests that are waiting for their next step or running a step."""
        with self._lock:
            return list(self._requests)

    def add(self, request: RequestProgress, *, stop_at: int) -> None:
        """Adds a request, so that it is considered for the next steps until `stop_at` steps are completed in total."""
        with self._lock:
            request.waited, request.stop_at = 0, stop_at
            self._requests.add(request)

    def stop_early(self, request: RequestProgress) -> None:
        """Makes a request leave after its current step. If none of its steps is running, it leaves after its next
        step.
        """
        with self._lock:
            request.stop_at = min(request.stop_at, request.done + 1)

    def remove(self, request: RequestProgress) -> None:
        """Removes a request, so that it runs no further steps. Does nothing if the scheduler does not contain the
        request.
        """
        with self._lock:
            self._requests.discard(request)

    def next_batch(self, now_s: float) -> list[RequestProgress]:
        """Returns the requests that run the next step together, or an empty list if no request is waiting.

        The returned requests remain in the scheduler. `now_s` is the current time, in seconds on the clock of the
        requests' deadlines.
        """
        with self._lock:
            ordered = sorted(self._requests, key=lambda request: self._rank(request, now_s))
            if not ordered:
                return []
            first = ordered[0]
            candidates = [request for request in ordered if _can_join(request, first)]
            batch = candidates[: self._sizes.size(self._size_class(first), len(candidates))]
            for request in ordered:
                request.waited = 0 if request in batch else request.waited + 1
            return batch

    def record(
        self, batch: Sequence[RequestProgress], errors: Sequence[StagemeshError | None], *, seconds: float
    ) -> bool:
        """Records that a step of the requests in `batch` has ended after `seconds` seconds, and removes the requests
        that have stopped. Returns whether there are such requests.

        `errors` contains the error of each request, or None if its step succeeded.
        """
        with self._lock:
            self._sizes.record(self._size_class(batch[0]), len(batch), seconds)
            self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds
            has_stopped = False
            for request, error in zip(batch, errors, strict=True):
                if error is not None:
                    # None is not stored: the step loop may have ended during the step, and has then set an error.
                    request.error = error
                request.done += error is None
                if error is not None or request.done >= request.stop_at:
                    self._requests.discard(request)
                    has_stopped = True
            return has_stopped

    def work_s(self) -> float:
        """Returns the estimated time that all remaining steps of all requests take, in seconds."""
        return self.step_s * sum(request.steps_left for request in self.requests)

    # -- inner workings

    def _rank(self, request: RequestProgress, now_s: float) -> tuple[object, ...]:
        late = request.deadline_s is not None and now_s + (request.steps_left + 1) * self.step_s >= request.deadline_s
        overdue = request.waited >= self._max_wait_steps
        precedence = (not overdue, -request.waited if overdue else 0, not late)
        return (*precedence, -request.priority, request.steps_left, request.arrival)

    @staticmethod
    def _size_class(request: RequestProgress) -> Hashable:
        """Returns the key of a request's size class. All requests with the same key take about the same time for a
        step.
        """
        return (request.key, request.tokens.bit_length())


class BatchSizes:
    """Finds the batch size with the shortest time per request, based on measured durations of steps.

    Batch sizes are measured in ascending order. Each batch size is measured several times, because a single step may be
    slow by chance. The shortest of the recent durations is used.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._times: OrderedDict[Hashable, dict[int, deque[float]]] = OrderedDict()

    def size(self, key: Hashable, available: int) -> int:
        """Returns the batch size for the next step. `key` is the size class of the requests, and `available` is the
        number of requests that could share the step.
        """
        times, best = self._times.get(key, {}), 1
        limit = min(available, self._max_batch)
        for size in range(1, limit + 1):
            if len(times.get(size, ())) < _MIN_MEASUREMENTS:
                return size
            if self._row_s(times, size) < _WORTHWHILE_RATIO * self._row_s(times, best):
                best = size
        return best

    def record(self, key: Hashable, size: int, seconds: float) -> None:
        """Records that a step with `size` requests of the size class `key` has taken `seconds` seconds."""
        self._times.setdefault(key, {}).setdefault(size, deque(maxlen=_KEPT_MEASUREMENTS)).append(seconds)
        self._times.move_to_end(key)
        if len(self._times) > _MAX_KEYS:
            self._times.popitem(last=False)

    @staticmethod
    def _row_s(times: dict[int, deque[float]], size: int) -> float:
        return min(times[size]) / size


def _can_join(request: RequestProgress, first: RequestProgress) -> bool:
    fewer, more = sorted((request.tokens, first.tokens))
    is_similar = request.key == first.key and more <= _MAX_TOKENS_RATIO * fewer
    return is_similar and request.steps_left <= _MAX_STEPS_RATIO * first.steps_left


class StepLoop:
    """Runs the denoising steps of all requests, one batch at a time.

    The executor selects and records the steps where it computes them, because the event loop would need as long to
    start the next step as a small model needs for a part of it. The event loop reports a step while the next one runs.

    Other worker calls, such as the calls that begin or end a request, run before the next batch. Otherwise, each of
    these calls would wait for a step, so that long requests would delay short requests.
    """

    def __init__(self, executor: Executor, scheduler: StepScheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self.calls = EngineCalls()
        """The denoising steps so far."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._batch: Sequence[RequestProgress] = ()
        self._began_s = 0.0
        self._has_stopped = self._ended = False
        """Whether a request of the latest step has stopped, and whether the loop has ended."""

    async def run_steps(self, request: RequestProgress, stop_at: int) -> AsyncGenerator[int, None]:
        """Runs a request until `stop_at` steps are completed in total. Yields the number of completed steps after each
        step.

        `StepScheduler.stop_early` makes the request stop earlier. Raises the step's error if a step fails.
        """
        if self._ended:
            raise UnavailableError("the engine has ended", reason="SHUTTING_DOWN")
        yielded = request.done
        self._scheduler.add(request, stop_at=stop_at)
        self._changed.set()
        try:
            while yielded < request.stop_at:
                await request.reported.wait()
                request.reported.clear()
                while yielded < request.done:
                    yielded += 1
                    yield yielded
                if request.error is not None:
                    raise request.error
        finally:
            self._scheduler.remove(request)

    async def serve(self) -> None:
        """Runs the steps of all requests until this coroutine is cancelled.

        After the cancellation, requests that wait for a step fail with UnavailableError.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._serve()
        finally:
            self._ended = True
            for request in self._scheduler.requests:
                request.error = UnavailableError("the engine has ended", reason="SHUTTING_DOWN")
                request.reported.set()

    async def _serve(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._executor.repeat("step", self._next_step, self._record)
            except StagemeshError as exc:
                if not self._batch:
                    raise
                self._record([exc] * len(self._batch))
            if self._scheduler.requests:
                # Allows requests that have stopped to make their calls before the next step.
                await asyncio.sleep(0)
            else:
                await self._changed.wait()

    # -- called where the steps are computed

    def _next_step(self) -> tuple[list[str]] | None:
        """Returns the names of the requests of the next step, or None if no step may run now."""
        if self._ended or self._has_stopped:
            self._has_stopped = False
            return None
        self._batch, self._began_s = self._scheduler.next_batch(time.monotonic()), time.monotonic()
        return ([request.request_id for request in self._batch],) if self._batch else None

    def _record(self, errors: Sequence[StagemeshError | None]) -> None:
        batch, seconds, self._batch = self._batch, time.monotonic() - self._began_s, ()
        self._has_stopped = self._scheduler.record(batch, errors, seconds=seconds)
        assert self._loop is not None, "`serve` has not been called"
        self._loop.call_soon_threadsafe(self._report, batch, seconds)

    def _report(self, batch: Sequence[RequestProgress], seconds: float) -> None:
        self.calls.add((request.trace for request in batch), seconds=seconds)
        for request in batch:
            request.reported.set()
