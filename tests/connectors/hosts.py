"""Two replicas' data planes with real gRPC between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc
import numpy as np

from stagemesh.connectors.base import AUTO, ConnectorName, EdgeKey, Inlet, Outlet, Packet, StepPolicy
from stagemesh.connectors.channels import SERVER_OPTIONS
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.errors import StagemeshError
from stagemesh.connectors.stage_service import add_stage_service
from stagemesh.connectors.status import to_grpc_code, to_trailing_metadata
from stagemesh.v1 import stage_pb2, stage_pb2_grpc


class Host(stage_pb2_grpc.StageServiceServicer):
    """A data plane behind PutChunk and GetChunk, as a stage serves it."""

    def __init__(self, replica: str, **limits: int) -> None:
        self.plane = DataPlane(replica=replica, pipeline="p", generation="g", **{"arena_bytes": 16 << 20, **limits})
        self.replica = replica
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_stage_service(self, self.server)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    @classmethod
    async def started(cls, replica: str, **limits: int) -> Self:
        """A host that serves. The caller closes it."""
        host = cls(replica, **limits)
        await host.server.start()
        return host

    async def PutChunk(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        try:
            async for response in self.plane.serve_put(request_iterator):
                yield response
        except StagemeshError as exc:
            await context.abort(to_grpc_code(exc), exc.message, to_trailing_metadata(exc))

    async def GetChunk(self, request: Any, context: Any) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        key = EdgeKey(request.key.request_id, request.key.edge, request.key.attempt)
        async for response in self.plane.replay(key, first_seq=request.first_seq):
            yield response

    async def close(self) -> None:
        await self.plane.close()
        await self.server.stop(None)


@asynccontextmanager
async def two_hosts(**limits: int) -> AsyncIterator[tuple[Host, Host]]:
    """A producer "a-0" and a consumer "b-0"."""
    producer, consumer = await Host.started("a-0", **limits), await Host.started("b-0", **limits)
    try:
        yield producer, consumer
    finally:
        await producer.close()
        await consumer.close()


def open_flow(
    producer: Host,
    consumer: Host,
    *,
    request: str = "r",
    connector: ConnectorName = AUTO,
    policy: Any = None,
) -> tuple[Outlet, Inlet]:
    """Both ends of a flow."""
    key = EdgeKey(request, "a->b", 1)
    inlet = consumer.plane.open_inlet(key, producer=producer.replica)
    outlet = producer.plane.open_outlet(
        key, endpoint=consumer.endpoint, consumer=consumer.replica, connector=connector, policy=policy or StepPolicy()
    )
    return outlet, inlet


def packet(seq: int, size: int = 1000) -> Packet:
    """A packet whose content tells its number and is different everywhere."""
    rng = np.random.default_rng(seq)
    return Packet({"x": rng.standard_normal(size).astype(np.float32), "n": np.array([seq], np.int64)}, {"seq": seq})
