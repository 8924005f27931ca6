"""Runs the denoising steps of all requests in batches, and runs other worker calls between the batches."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.scheduling.step_scheduler import StepScheduler, Turn

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.worker import PreparedRequest


class RequestProgress:
    """Counts the completed steps of one request, and wakes the coroutine that waits for the request's next step."""

    def __init__(self, name: str, prepared: "PreparedRequest", *, priority: int, deadline_s: float | None) -> None:
        self.total, self.done = prepared.total_steps, prepared.step_index
        self.stop_at = 0
        """Number of completed steps at which the request leaves the step loop."""
        self.turn = Turn(
            name, prepared.key, prepared.tokens, prepared.total_steps, priority=priority, deadline_s=deadline_s
        )
        self._error: StagemeshError | None = None
        self._recorded = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether the request has failed or has completed `stop_at` steps."""
        return self._error is not None or self.done >= self.stop_at

    def stop_early(self) -> None:
        """Makes the request leave the step loop after its current step, or after its next step if no step is
        running."""
        self.stop_at = min(self.stop_at, self.done + 1)

    def record(self, error: StagemeshError | None) -> None:
        """Records a completed step, or a failed step if `error` is not None."""
        if error is None:
            self.done += 1
        self._error = error
        self._recorded.set()

    async def wait_step(self) -> None:
        """Waits for a step that was recorded after the previous call returned. Raises the step's error if the step
        failed."""
        await self._recorded.wait()
        self._recorded.clear()
        if self._error is not None:
            raise self._error


class StepLoop:
    """Runs the denoising steps of all requests, one batch at a time.

    Other worker calls, such as the calls that begin or end a request, run before the next batch. Otherwise, each of
    these calls would wait for a step, so that long requests would delay short requests.
    """

    def __init__(self, executor: Executor, scheduler: StepScheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._requests: dict[str, RequestProgress] = {}
        self._calls = 0
        self._changed = asyncio.Event()
        self._ended = False

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the worker and returns its result. No step starts until the call has returned."""
        self._calls += 1
        try:
            return await self._executor.call(method, *args, **kwargs)
        finally:
            self._calls -= 1
            self._changed.set()

    async def run_steps(self, request: RequestProgress, stop_at: int) -> AsyncGenerator[int, None]:
        """Runs a request until `stop_at` steps are completed. Yields the number of completed steps after each step.

        `RequestProgress.stop_early` makes the request stop earlier. Raises the error of a failed step.
        """
        if self._ended:
            raise UnavailableError("the engine has ended")
        request.turn.steps_left = request.total - request.done
        self._requests[request.turn.request_id] = request
        request.stop_at = stop_at
        self._scheduler.add(request.turn)
        self._changed.set()
        try:
            while request.done < request.stop_at:
                await request.wait_step()
                yield request.done
        finally:
            self._scheduler.remove(request.turn)
            del self._requests[request.turn.request_id]

    async def serve(self) -> None:
        """Runs the steps of all requests until this coroutine is cancelled.

        After the cancellation, requests that wait for a step fail with UnavailableError.
        """
        try:
            await self._serve()
        finally:
            self._ended = True
            for request in self._requests.values():
                request.record(UnavailableError("the engine has ended"))

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [] if self._calls else self._scheduler.next_batch(loop.time())
            if not batch:
                self._changed.clear()
                await self._changed.wait()
                continue
            began_s = loop.time()
            requests = [self._requests[turn.request_id] for turn in batch]
            errors = await self._step(batch)
            self._scheduler.done(batch, loop.time() - began_s)
            for request, error in zip(requests, errors, strict=True):
                request.record(error)
                if request.stopped:
                    self._scheduler.remove(request.turn)
            # Allows requests that have stopped to make their calls before the next step.
            await asyncio.sleep(0)

    async def _step(self, batch: list[Turn]) -> list[StagemeshError | None]:
        try:
            errors: list[StagemeshError | None] = await self._executor.call("step", [turn.request_id for turn in batch])
        except StagemeshError as exc:
            return [exc] * len(batch)
        return errors
