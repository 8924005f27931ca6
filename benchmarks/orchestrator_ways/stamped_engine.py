"""A fake engine whose every output says when it was made."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from stagemesh.connectors.base import Packet
from stagemesh.services.engines.base import Emission, EngineEvent, Task
from stagemesh.services.engines.fake.engine import FakeEngine


class StampedEngine(FakeEngine):
    """Emits, in place of its text, nanoseconds of CLOCK_MONOTONIC, which all processes of a host share."""

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """See Engine."""
        async with aclosing(super().submit(task)) as events:
            async for event in events:
                yield _stamped(event.packet) if isinstance(event, Emission) else event


def _stamped(packet: Packet) -> Emission:
    stamp = np.frombuffer(str(time.monotonic_ns()).encode(), np.uint8)
    return Emission(Packet({"text": stamp}, packet.metadata))
