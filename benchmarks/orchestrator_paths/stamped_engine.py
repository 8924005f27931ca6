"""A fake engine whose outputs contain the times at which they were made."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.packets import Packet
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.services.engines.base import Emission, EngineEvent, Task


class StampedEngine(FakeEngine):
    """Emits the nanoseconds of CLOCK_MONOTONIC, which all processes of a host share, instead of text."""

    def __init__(self, config: StageConfig, *, beat_s: float | None = None) -> None:
        # With a beat, the outputs of all tasks are emitted together, as by an engine that advances all its requests.
        super().__init__(config)
        self._beat_s = beat_s
        self._phase_s = random.Random(config.replica).uniform(0, beat_s or 0.0)

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        async with aclosing(super().submit(task)) as events:
            async for event in events:
                if not isinstance(event, Emission):
                    yield event
                    continue
                if self._beat_s is not None:
                    now_s = asyncio.get_running_loop().time()
                    await asyncio.sleep(self._beat_s - (now_s - self._phase_s) % self._beat_s)
                yield _stamped(event.packet)


def _stamped(packet: Packet) -> Emission:
    stamp = np.frombuffer(str(time.monotonic_ns()).encode(), np.uint8)
    return Emission(Packet({"text": stamp}, packet.metadata))
