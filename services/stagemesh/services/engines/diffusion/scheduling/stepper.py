"""Has steps made for those who wait for one, and everything else that requests need done between them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.scheduling.step_scheduler import StepScheduler, Turn

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.worker import Begun


class RequestProgress:
    """One request among its steps."""

    def __init__(self, name: str, begun: "Begun", *, priority: int, deadline_s: float | None) -> None:
        self.total, self.done = begun.total_steps, begun.step_index
        self.upto = 0
        """It takes no turn past this step."""
        self.turn = Turn(name, begun.key, begun.tokens, begun.total_steps, priority=priority, deadline_s=deadline_s)
        self._error: StagemeshError | None = None
        self._noted = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether it is to have no further step for now."""
        return self._error is not None or self.done >= self.upto

    def cut(self) -> None:
        """It takes no turn past the one that is its next, or goes on now."""
        self.upto = min(self.upto, self.done + 1)

    def note(self, error: StagemeshError | None) -> None:
        """A step was made, or failed."""
        if error is None:
            self.done += 1
        self._error = error
        self._noted.set()

    async def stepped(self) -> None:
        """Returns after steps that were not waited for yet; raises what one failed with."""
        await self._noted.wait()
        self._noted.clear()
        if self._error is not None:
            raise self._error


class Stepper:
    """Steps of those whose turn it is, one after the other, on an executor that does one thing at a time.

    What begins or ends a request goes before the next step: otherwise a short request would wait for a step of a long
    one each time that it needs something done.
    """

    def __init__(self, executor: Executor, scheduler: StepScheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._courses: dict[str, RequestProgress] = {}
        self._calls = 0
        self._changed = asyncio.Event()
        self._ended = False

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `Executor.call`: no step is begun before it is done."""
        self._calls += 1
        try:
            return await self._executor.call(method, *args, **kwargs)
        finally:
            self._calls -= 1
            self._changed.set()

    async def turns(self, course: RequestProgress, upto: int) -> AsyncGenerator[int, None]:
        """Waits for its turns up to a step; yields how many are done. `RequestProgress.cut` makes it fewer."""
        if self._ended:
            raise UnavailableError("the engine has ended")
        course.turn.steps_left = course.total - course.done
        self._courses[course.turn.request_id] = course
        course.upto = upto
        self._scheduler.add(course.turn)
        self._changed.set()
        try:
            while course.done < course.upto:
                await course.stepped()
                yield course.done
        finally:
            self._scheduler.remove(course.turn)
            del self._courses[course.turn.request_id]

    async def serve(self) -> None:
        """Runs until it is cancelled; who waits for a step then fails."""
        try:
            await self._serve()
        finally:
            self._ended = True
            for course in self._courses.values():
                course.note(UnavailableError("the engine has ended"))

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [] if self._calls else self._scheduler.next_batch(loop.time())
            if not batch:
                self._changed.clear()
                await self._changed.wait()
                continue
            began_s = loop.time()
            courses = [self._courses[turn.request_id] for turn in batch]
            errors = await self._step(batch)
            self._scheduler.done(batch, loop.time() - began_s)
            for course, error in zip(courses, errors, strict=True):
                course.note(error)
                if course.ended:
                    self._scheduler.remove(course.turn)
            # Those that are at their end ask for what they need now.
            await asyncio.sleep(0)

    async def _step(self, batch: list[Turn]) -> list[StagemeshError | None]:
        try:
            errors: list[StagemeshError | None] = await self._executor.call("step", [turn.request_id for turn in batch])
        except StagemeshError as exc:
            return [exc] * len(batch)
        return errors
