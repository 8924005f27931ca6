"""Producers whose messages a test writes by hand, connected to a real consumer."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from stagemesh.common.wire.versions import own_protocol
from stagemesh.conformance import Host
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.packets import EdgeKey
from stagemesh.connectors.wire import key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from tests.connectors.hosts import started_host

KEY = EdgeKey("r", "a->b", 1)
WIRE_KEY = key_to_wire(KEY)

PutCall: TypeAlias = "grpc.aio.StreamStreamCall[stage_pb2.PutChunkRequest, stage_pb2.PutChunkResponse]"


def hello(**fields: Any) -> stage_pb2.PutChunkRequest:
    """Returns the first message of an incarnation of producer "a-0". `fields` replaces fields of its Hello."""
    usual = {"replica": "a-0", "incarnation": "i", "pipeline": "p", "generation": "g", "protocol": own_protocol()}
    return stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(**{**usual, **fields}))


def opening(key: EdgeKey = KEY, connector: int = chunk_pb2.CONNECTOR_GRPC) -> stage_pb2.PutItem:
    """Returns the item that opens a flow."""
    return stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key_to_wire(key), connector=connector))  # type: ignore[arg-type]


def chunk(key: EdgeKey = KEY, **fields: Any) -> stage_pb2.PutItem:
    """Returns the item with a chunk of a flow."""
    return stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key_to_wire(key), **fields))


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

    async def welcome(self) -> stage_pb2.Welcome:
        """Returns the consumer's answer to the Hello."""
        response = await self._response()
        assert response.HasField("welcome")
        return response.welcome

    async def reply(self, is_wanted: Callable[[stage_pb2.PutReply], bool]) -> stage_pb2.PutReply:
        """Returns the next reply for which `is_wanted` is true."""
        while True:
            for reply in (await self._response()).replies:
                if is_wanted(reply):
                    return reply

    async def answer(self, kind: str) -> stage_pb2.PutReply:
        """Returns the next reply of a kind."""
        return await self.reply(lambda reply: reply.WhichOneof("reply") == kind)

    async def reason(self) -> str:
        """Returns the reason of the next rejected flow. Repeats the last items if the consumer asks for it."""
        last = self._last
        while True:
            verdict = await self.reply(lambda reply: reply.HasField("rejected") or reply.HasField("resync"))
            if verdict.HasField("rejected"):
                return verdict.rejected.error.reason
            await self.put(opening(), *last)

    async def _response(self) -> stage_pb2.PutChunkResponse:
        response = await self.call.read()
        assert isinstance(response, stage_pb2.PutChunkResponse), await self.call.details()
        return response


@asynccontextmanager
async def dialled(host: Host, first: stage_pb2.PutChunkRequest) -> AsyncIterator[Peer]:
    """Yields a producer that has sent its first message to a consumer."""
    async with open_channel(host.endpoint) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).PutChunk()
        await call.write(first)
        yield Peer(host, call)
        call.cancel()


@asynccontextmanager
async def peer(first: stage_pb2.PutChunkRequest | None = None) -> AsyncIterator[Peer]:
    """Yields a producer that has sent its first message, by default a valid Hello, to a new consumer."""
    async with (
        started_host("b-0", window_bytes=1 << 20, arena_bytes=2 << 20) as host,
        dialled(host, first or hello()) as one,
    ):
        yield one


@asynccontextmanager
async def open_peer() -> AsyncIterator[Peer]:
    """Yields a producer that has opened a flow by grpc."""
    async with peer() as one:
        one.inlet = one.host.plane.open_inlet(KEY, producer="a-0")
        await one.put(opening())
        assert (await one.answer("opened")).opened.connector == chunk_pb2.CONNECTOR_GRPC
        yield one
        await one.inlet.aclose()
