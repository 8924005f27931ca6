"""The loop that runs the denoising steps of all requests."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TypeAlias

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.services.engines.calls import EngineCalls
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.scheduling.step_scheduler import RequestProgress, StepScheduler

_StepErrors: TypeAlias = Sequence[StagemeshError | None]


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

    def _record(self, errors: _StepErrors) -> None:
        batch, seconds, self._batch = self._batch, time.monotonic() - self._began_s, ()
        self._has_stopped = self._scheduler.record(batch, errors, seconds=seconds)
        assert self._loop is not None, "`serve` has not been called"
        self._loop.call_soon_threadsafe(self._report, batch, seconds)

    def _report(self, batch: Sequence[RequestProgress], seconds: float) -> None:
        self.calls.add((request.trace for request in batch), seconds=seconds)
        for request in batch:
            request.reported.set()
