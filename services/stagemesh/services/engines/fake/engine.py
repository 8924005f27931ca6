"""The fake engine. Its output depends only on seed, prompt and step, so that runs can be compared byte by byte."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from stagemesh.common.stage_config import StageConfig
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import EngineEvent, EngineLoad, Task
from stagemesh.services.engines.fake.options import fake_options
from stagemesh.services.engines.fake.task_run import FakeRun, hold_memory


class FakeEngine:
    """Runs the tasks of a fake stage, at most `max_running` at a time."""

    def __init__(self, config: StageConfig) -> None:
        self._stage, self._function = config.stage, config.function or "source"
        self._options = fake_options(config.options, stage=config.stage)
        self._slots = asyncio.Semaphore(self._options.max_running)
        self._runs = set[FakeRun]()
        self._memory = hold_memory(0)
        self._closed = asyncio.Event()

    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities(can_pause=True, can_resume=True)

    async def start(self, report: Callable[[str], None]) -> None:
        report("loading the fake engine")
        self._memory = hold_memory(self._options.memory_bytes)
        await asyncio.sleep(self._options.start_s)

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        run = FakeRun(task, stage=self._stage, function=self._function, options=self._options, closed=self._closed)
        self._runs.add(run)
        try:
            async with self._slots, aclosing(run.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._runs.discard(run)

    def load(self) -> EngineLoad:
        running = min(len(self._runs), self._options.max_running)
        return EngineLoad(running, len(self._runs) - running, work_s=sum(run.left_s for run in self._runs))

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("a fake engine never fails")

    async def close(self) -> None:
        self._closed.set()
        self._memory = hold_memory(0)
