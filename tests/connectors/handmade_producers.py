"""Producers whose messages a test writes by hand, connected to a real consumer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.packets import EdgeKey
from stagemesh.connectors.wire import key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from tests.connectors.hosts import Host

KEY = EdgeKey("r", "a->b", 1)
WIRE_KEY = key_to_wire(KEY)
OPEN = stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=WIRE_KEY, connector=chunk_pb2.CONNECTOR_GRPC))

PutCall: TypeAlias = "grpc.aio.StreamStreamCall[stage_pb2.PutChunkRequest, stage_pb2.PutChunkResponse]"


class Peer:
    """A producer whose messages are written by hand."""

    inlet: Inlet
    """The consumer's end of the flow that `open_peer` opens."""

    def __init__(self, host: Host, call: PutCall) -> None:
        self.host, self.call = host, call
        self._last: tuple[stage_pb2.PutItem, ...] = ()

    async def put(self, *items: stage_pb2.PutItem) -> None:
        """Sends items in one message."""
        self._last = items
        await self.call.write(stage_pb2.PutChunkRequest(items=items))

    async def put_data(self, data: chunk_pb2.ChunkData, *, seq: int = 0) -> None:
        """Sends the chunk with the number `seq`."""
        await self.put(stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=WIRE_KEY, seq=seq, data=data)))

    async def welcomed(self) -> None:
        """Returns when the consumer has answered the Hello."""
        response = await self.call.read()
        assert isinstance(response, stage_pb2.PutChunkResponse), await self.call.details()
        assert response.HasField("welcome")

    async def answer(self, kind: str) -> stage_pb2.PutReply:
        """Returns the next reply of a kind."""
        while True:
            response = await self.call.read()
            assert isinstance(response, stage_pb2.PutChunkResponse), await self.call.details()
            for reply in response.replies:
                if reply.WhichOneof("reply") == kind:
                    return reply

    async def reason(self) -> str:
        """Returns the reason of the next rejected flow. Repeats the last items if the consumer asks for it."""
        last = self._last
        while True:
            response = await self.call.read()
            assert isinstance(response, stage_pb2.PutChunkResponse), await self.call.details()
            for reply in response.replies:
                if reply.HasField("rejected"):
                    return reply.rejected.error.reason
                if reply.HasField("resync"):
                    await self.put(OPEN, *last)


@asynccontextmanager
async def dialled(
    host: Host, *, incarnation: str = "i", generation: str = "g", pipeline: str = "p"
) -> AsyncIterator[Peer]:
    """Yields an incarnation of producer "a-0" that has sent Hello to a consumer."""
    async with open_channel(host.endpoint) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).PutChunk()
        hello = stage_pb2.Hello(
            replica="a-0", incarnation=incarnation, pipeline=pipeline, generation=generation, protocol=own_protocol()
        )
        await call.write(stage_pb2.PutChunkRequest(hello=hello))
        yield Peer(host, call)
        call.cancel()


@asynccontextmanager
async def peer(*, generation: str = "g", pipeline: str = "p") -> AsyncIterator[Peer]:
    """Yields a producer that has sent Hello to a consumer of its own."""
    host = await Host.started("b-0", window_bytes=1 << 20, arena_bytes=2 << 20)
    try:
        async with dialled(host, generation=generation, pipeline=pipeline) as one:
            yield one
    finally:
        await host.close()


@asynccontextmanager
async def open_peer() -> AsyncIterator[Peer]:
    """Yields a producer that has opened a flow by grpc."""
    async with peer() as one:
        one.inlet = one.host.plane.open_inlet(KEY, producer="a-0")
        await one.put(OPEN)
        assert (await one.answer("opened")).opened.connector == chunk_pb2.CONNECTOR_GRPC
        yield one
        await one.inlet.aclose()
