"""The data planes over which the orchestrator sends the input that clients stream."""

import secrets
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from stagemesh.common.connector_descriptors import GRPC
from stagemesh.common.descriptors import INPUT
from stagemesh.common.errors import CancelledRequestError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import EdgeKey
from stagemesh.connectors.flow.chunking import StepPolicy
from stagemesh.connectors.flow.edge_meters import EdgeMeters
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.orchestrator.fleet.replica import Replica

ARENA_BYTES = 8 << 20
"""The memory of a data plane for chunks that no stage has received yet, in bytes."""


class InputPlanes:
    """The data planes of one orchestrator: one for each generation, created at its first flow.

    A stage admits only producers of its own generation.
    """

    def __init__(self, pipeline: str) -> None:
        """Creates no data plane yet. `pipeline` is the pipeline's name."""
        self.producer = f"{INPUT}-{secrets.token_hex(4)}"
        """The name by which stages know this orchestrator as a producer."""
        self.meters = EdgeMeters()
        """The counts of what all data planes have sent."""
        self._pipeline = pipeline
        self._planes: dict[str, DataPlane] = {}
        self._flows = Counter[str]()
        """The number of open flows, by generation."""

    @property
    def generations(self) -> frozenset[str]:
        """The generations that have a data plane."""
        return frozenset(self._planes)

    @asynccontextmanager
    async def open_outlet(self, key: EdgeKey, consumer: Replica) -> AsyncGenerator[Outlet]:
        """Opens a flow to `consumer`, which must expect it. Aborts an unfinished flow at the end of the block.

        Raises NotReadyError (NO_MEMORY) if not enough memory is available.
        """
        generation = consumer.generation
        self._flows[generation] += 1
        try:
            plane = self._planes.get(generation) or await self._add(generation)
            outlet = plane.open_outlet(
                key,
                endpoint=consumer.endpoint,
                consumer=consumer.name,
                connector=GRPC,
                policy=StepPolicy(),
                server_name=consumer.server_name,
            )
            try:
                yield outlet
            finally:
                outlet.abort(CancelledRequestError("the request stopped before the end of its input"))
        finally:
            self._flows[generation] -= 1

    async def close(self) -> None:
        """Closes all data planes. Idempotent."""
        while self._planes:
            _, plane = self._planes.popitem()
            await plane.close()

    async def _add(self, generation: str) -> DataPlane:
        """Creates the data plane of a generation. Closes those of other generations without flows."""
        plane = self._planes[generation] = DataPlane(
            replica=self.producer,
            pipeline=self._pipeline,
            generation=generation,
            arena_bytes=ARENA_BYTES,
            shared_arena=False,
            meters=self.meters,
        )
        for idle in [name for name in self._planes if not self._flows[name]]:
            await self._planes.pop(idle).close()
        return plane
