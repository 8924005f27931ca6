"""A stage that is made of stubs and docs/protocol.md alone receives flows and sends them on, between real replicas."""

import asyncio
import hashlib
import itertools
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import pytest

from stagemesh.connectors.conformance import assert_same, receive_all, send_all
from stagemesh.connectors.edge import EdgeKey, Packet
from stagemesh.connectors.flow.chunking import StepPolicy
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from stagemesh.v1.protocol_pb2 import Protocol
from tests.connectors.hosts import Host, packet

Item: TypeAlias = stage_pb2.PutItem
Reply: TypeAlias = stage_pb2.PutReply
PROTOCOL = Protocol(lowest_version=1, highest_version=1)
LIMIT_BYTES = 8 << 20
WINDOW_BYTES = 1 << 20


@dataclass
class Chunk:
    """A received chunk, with the bytes of each tensor."""

    data: chunk_pb2.ChunkData
    contents: list[bytes]


@dataclass
class Received:
    """The state of an incoming flow."""

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    next_seq: int = 0
    received_bytes: int = 0
    pieces: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def digest_of(chunks: Sequence[chunk_pb2.ChunkData]) -> bytes:
    """Returns the digest of a flow, as the protocol defines it."""

    def described(data: chunk_pb2.ChunkData) -> bytes:
        tensors = b"".join(
            struct.pack("<I", len(each.name.encode()))
            + each.name.encode()
            + struct.pack(f"<II{len(each.shape)}Q", each.dtype, len(each.shape), *each.shape)
            for each in data.tensors
        )
        return struct.pack("<I", len(data.tensors)) + tensors

    runs = itertools.groupby(map(described, chunks))
    return hashlib.sha256(b"".join(struct.pack("<Q", len(list(run))) + each for each, run in runs)).digest()


class MinimumConsumer:
    """The consumer of a stage of the minimum profile, replica "m-0"."""

    def __init__(self) -> None:
        self.flows: dict[str, Received] = {}
        self.kinds: set[str] = set()

    async def put_chunk(
        self, requests: AsyncIterator[stage_pb2.PutChunkRequest], context: Any
    ) -> AsyncIterator[stage_pb2.PutChunkResponse]:
        del context
        welcome = stage_pb2.Welcome(replica="m-0", incarnation="1", inline_limit_bytes=1024, protocol=PROTOCOL)
        async for request in requests:
            if request.HasField("hello"):
                yield stage_pb2.PutChunkResponse(welcome=welcome)
            yield stage_pb2.PutChunkResponse(replies=[reply for item in request.items for reply in self._take(item)])

    def _take(self, item: Item) -> list[Reply]:
        kind = item.WhichOneof("item")
        assert kind is not None
        self.kinds.add(kind)
        content = getattr(item, kind)
        flow = self.flows[content.key.request_id]
        match kind:
            case "open":
                flow.pieces.clear()
                opened = stage_pb2.EdgeOpened(
                    key=content.key,
                    next_seq=flow.next_seq,
                    credit_limit_bytes=flow.received_bytes + WINDOW_BYTES,
                    connector=content.connector,
                    opening=content.opening,
                )
                return [Reply(opened=opened)]
            case "demand":
                limit_bytes = flow.received_bytes + content.size_bytes
                return [Reply(credit=stage_pb2.CreditGrant(key=content.key, credit_limit_bytes=limit_bytes))]
            case "fragment":
                assert content.offset == len(flow.pieces)
                flow.pieces += content.payload
                return []
            case _:
                return self._take_chunk(flow, content)

    def _take_chunk(self, flow: Received, chunk: chunk_pb2.Chunk) -> list[Reply]:
        assert chunk.seq == flow.next_seq
        flow.next_seq += 1
        replies: list[Reply] = []
        if chunk.HasField("data"):
            tensors = chunk.data.tensors
            contents = [
                bytes(flow.pieces[each.streamed.offset :][: each.streamed.size_bytes])
                if each.HasField("streamed")
                else each.inline
                for each in tensors
            ]
            flow.pieces.clear()
            flow.received_bytes += chunk.data.size_bytes
            flow.chunks.append(Chunk(chunk.data, contents))
        else:
            chunks = [each.data for each in flow.chunks]
            assert (chunk.end.count, chunk.end.digest) == (len(chunks), digest_of(chunks))
            flow.ended.set()
            replies.append(Reply(commit=stage_pb2.EdgeCommit(key=chunk.key)))
        ack = stage_pb2.ChunkAck(
            key=chunk.key, next_seq=flow.next_seq, credit_limit_bytes=flow.received_bytes + WINDOW_BYTES
        )
        return [Reply(ack=ack), *replies]


class Sending:
    """An outgoing flow of the replica "m-0", within the consumer's credit."""

    def __init__(self, call: Any, key: chunk_pb2.EdgeKey) -> None:
        self._call, self._key = call, key
        self._sent_bytes = self._limit_bytes = self._window_bytes = self._inline_limit_bytes = 0
        self._is_committed = False

    async def open(self) -> None:
        hello = stage_pb2.Hello(replica="m-0", incarnation="1", pipeline="p", generation="g", protocol=PROTOCOL)
        await self._call.write(stage_pb2.PutChunkRequest(hello=hello))
        self._inline_limit_bytes = (await self._call.read()).welcome.inline_limit_bytes
        opening = stage_pb2.OpenEdge(key=self._key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1)
        await self._put(Item(open=opening))
        while not self._window_bytes:
            await self._receive()

    async def send(self, seq: int, chunk: Chunk) -> None:
        size_bytes = chunk.data.size_bytes
        if size_bytes > self._window_bytes:
            await self._put(Item(demand=stage_pb2.CreditDemand(key=self._key, size_bytes=size_bytes)))
        while self._sent_bytes + size_bytes > self._limit_bytes:
            await self._receive()
        self._sent_bytes += size_bytes
        for item in items_of(self._key, seq, chunk, is_inline=size_bytes <= self._inline_limit_bytes):
            await self._put(item)

    async def finish(self, chunks: Sequence[Chunk]) -> None:
        end = chunk_pb2.ChunkEnd(count=len(chunks), digest=digest_of([chunk.data for chunk in chunks]))
        await self._put(Item(chunk=chunk_pb2.Chunk(key=self._key, seq=len(chunks), end=end)))
        while not self._is_committed:
            await self._receive()

    async def _put(self, item: Item) -> None:
        await self._call.write(stage_pb2.PutChunkRequest(items=[item]))

    async def _receive(self) -> None:
        for reply in (await self._call.read()).replies:
            match reply.WhichOneof("reply"):
                case "opened":
                    self._window_bytes = self._limit_bytes = reply.opened.credit_limit_bytes
                case "ack":
                    self._limit_bytes = max(self._limit_bytes, reply.ack.credit_limit_bytes)
                case "credit":
                    self._limit_bytes = max(self._limit_bytes, reply.credit.credit_limit_bytes)
                case "commit":
                    self._is_committed = True


async def send_on(key: chunk_pb2.EdgeKey, chunks: Sequence[Chunk], *, endpoint: str) -> None:
    """Sends a flow to its end, and waits until the consumer has committed it."""
    options = [("grpc.max_receive_message_length", LIMIT_BYTES), ("grpc.max_send_message_length", LIMIT_BYTES)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).PutChunk()
        sending = Sending(call, key)
        await sending.open()
        for seq, chunk in enumerate(chunks):
            await sending.send(seq, chunk)
        await sending.finish(chunks)
        call.cancel()


def items_of(key: chunk_pb2.EdgeKey, seq: int, chunk: Chunk, *, is_inline: bool) -> list[Item]:
    data = chunk_pb2.ChunkData()
    data.CopyFrom(chunk.data)
    content, offset = b"".join(chunk.contents), 0
    for tensor, each in zip(data.tensors, chunk.contents, strict=True):
        tensor.ClearField("location")
        if each and is_inline:
            tensor.inline = each
        elif each:
            region = tensor.streamed
            region.transfer_id, region.offset, region.size_bytes = seq + 1, offset, len(each)
        offset += len(each)
    pieces = [
        chunk_pb2.ChunkFragment(
            key=key,
            transfer_id=seq + 1,
            total_bytes=len(content),
            offset=start,
            payload=content[start : start + (256 << 10)],
        )
        for start in range(0, 0 if is_inline else len(content), 256 << 10)
    ]
    return [*(Item(fragment=piece) for piece in pieces), Item(chunk=chunk_pb2.Chunk(key=key, seq=seq, data=data))]


@pytest.mark.parametrize("size_bytes", [0, 300, 30_000, 200_000, 700_000])
async def test_a_stage_of_the_minimum_profile_passes_chunks_on(size_bytes: int) -> None:
    stage, server = MinimumConsumer(), grpc.aio.server(options=[("grpc.max_receive_message_length", LIMIT_BYTES)])
    put = grpc.stream_stream_rpc_method_handler(
        stage.put_chunk,
        request_deserializer=stage_pb2.PutChunkRequest.FromString,
        response_serializer=stage_pb2.PutChunkResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("stagemesh.v1.StageService", {"PutChunk": put}),)
    )
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    a, c = await Host.started("a-0"), await Host.started("c-0", window_bytes=WINDOW_BYTES)
    sent: list[Packet] = [packet(seq, size_bytes) for seq in range(4)]
    try:
        received = stage.flows["r"] = Received()
        outlet = a.plane.open_outlet(
            EdgeKey("r", "a->m", 1), endpoint=endpoint, consumer="m-0", connector="auto", policy=StepPolicy()
        )
        await send_all(outlet, sent)
        await received.ended.wait()
        inlet = c.plane.open_inlet(EdgeKey("r", "m->c", 1), producer="m-0")
        key = chunk_pb2.EdgeKey(request_id="r", edge="m->c", attempt=1)
        _, arrived = await asyncio.gather(send_on(key, received.chunks, endpoint=c.endpoint), receive_all(inlet))
        assert_same(arrived, sent)
        assert "offer" not in stage.kinds
    finally:
        await a.close()
        await c.close()
        await server.stop(None)
