"""An engine that a test controls."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import numpy as np

from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Emission, EngineEvent, EngineLoad, Task, Usage

STEP_S = 0.02


class GatedEngine:
    """Emits one text at once, then waits for `gate`, then ends or fails."""

    abilities = EngineAbilities()

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.death = asyncio.Event()
        self.released: list[str] = []
        self.running: list[str] = []
        self.error: Exception | None = None
        self.load_error: Exception | None = None
        self.closed = False

    async def start(self, report: Callable[[str], None]) -> None:
        report("loading the gate")
        if self.load_error is not None:
            raise self.load_error

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        self.running.append(task.request_id)
        try:
            yield Emission(Packet({"text": np.frombuffer(b"hello", np.uint8)}))
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            yield Usage(engine_steps=1)
        finally:
            # An engine releases a task at the end of its step, not before.
            await asyncio.sleep(STEP_S)
            self.running.remove(task.request_id)
            self.released.append(task.request_id)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self.running), 0, work_s=2.5 if self.running else 0.0)

    async def wait_failed(self) -> str:
        await self.death.wait()
        return "the gate fell down"

    async def close(self) -> None:
        self.closed = True
