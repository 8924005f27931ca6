"""The smallest consumer and producer of a stage, made of generated stubs and docs/protocol.md alone."""

import asyncio
import hashlib
import itertools
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import grpc

from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from stagemesh.v1.chunk_pb2 import Error
from stagemesh.v1.protocol_pb2 import Protocol

Item: TypeAlias = stage_pb2.PutItem
Reply: TypeAlias = stage_pb2.PutReply
PROTOCOL = Protocol(lowest_version=1, highest_version=1)
LIMITS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.max_send_message_length", 8 << 20)]
WINDOW_BYTES = 1 << 20


class Identity(NamedTuple):
    """The names of a replica, and what it speaks."""

    replica: str
    incarnation: str
    pipeline: str
    generation: str
    protocol: Protocol = PROTOCOL


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
    error: Error | None = None
    """The error with which the producer aborted the flow."""


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


def put_chunk_handler(put_chunk: Any) -> Any:
    """Returns the handler of a method PutChunk."""
    return grpc.stream_stream_rpc_method_handler(
        put_chunk,
        request_deserializer=stage_pb2.PutChunkRequest.FromString,
        response_serializer=stage_pb2.PutChunkResponse.SerializeToString,
    )


def stage_service(**methods: Any) -> grpc.GenericRpcHandler:
    """Returns a StageService with these methods."""
    return grpc.method_handlers_generic_handler("stagemesh.v1.StageService", methods)


class MinimumConsumer:
    """The consumer of a stage of the minimum profile."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.flows: dict[str, Received] = {}
        self.kinds: set[str] = set()

    def handler(self) -> Any:
        """Returns the handler of PutChunk."""
        return put_chunk_handler(self.put_chunk)

    async def put_chunk(
        self, requests: AsyncIterator[stage_pb2.PutChunkRequest], context: Any
    ) -> AsyncIterator[stage_pb2.PutChunkResponse]:
        own = self._identity
        welcome = stage_pb2.Welcome(
            replica=own.replica, incarnation=own.incarnation, inline_limit_bytes=1024, protocol=own.protocol
        )
        async for request in requests:
            if request.HasField("hello"):
                yield stage_pb2.PutChunkResponse(welcome=welcome)
            yield stage_pb2.PutChunkResponse(replies=[reply for item in request.items for reply in self.take(item)])

    def take(self, item: Item) -> list[Reply]:
        """Returns the replies to an item."""
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
                    window_bytes=WINDOW_BYTES,
                    credit_limit_chunks=1 << 32,
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
            contents = [
                bytes(flow.pieces[each.streamed.offset :][: each.streamed.size_bytes])
                if each.HasField("streamed")
                else each.inline
                for each in chunk.data.tensors
            ]
            flow.pieces.clear()
            flow.received_bytes += chunk.data.size_bytes
            flow.chunks.append(Chunk(chunk.data, contents))
        elif chunk.HasField("abort"):
            flow.error = chunk.abort.error
            flow.ended.set()
        else:
            chunks = [each.data for each in flow.chunks]
            assert (chunk.end.count, chunk.end.digest) == (len(chunks), digest_of(chunks))
            flow.ended.set()
            replies.append(Reply(commit=stage_pb2.EdgeCommit(key=chunk.key)))
        limit_bytes = flow.received_bytes + WINDOW_BYTES
        ack = stage_pb2.ChunkAck(key=chunk.key, next_seq=flow.next_seq, credit_limit_bytes=limit_bytes)
        return [Reply(ack=ack), *replies]


class FlowRejectedError(Exception):
    """The consumer rejected a flow, with an error of the protocol."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class Sending:
    """An outgoing flow, within the consumer's credit."""

    def __init__(self, call: Any, key: chunk_pb2.EdgeKey, identity: Identity) -> None:
        self._call, self._key, self._identity = call, key, identity
        self._sent_bytes = self._limit_bytes = self._window_bytes = self._inline_limit_bytes = self._limit_chunks = 0
        self._is_committed = False

    async def open(self) -> None:
        await self._call.write(stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(**self._identity._asdict())))
        self._inline_limit_bytes = (await self._call.read()).welcome.inline_limit_bytes
        await self._put(Item(open=stage_pb2.OpenEdge(key=self._key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1)))
        while not self._window_bytes:
            await self._receive()

    async def send(self, seq: int, chunk: Chunk) -> None:
        size_bytes = chunk.data.size_bytes
        if 2 * size_bytes > self._window_bytes and self._sent_bytes + size_bytes > self._limit_bytes:
            await self._put(Item(demand=stage_pb2.CreditDemand(key=self._key, size_bytes=size_bytes)))
        while self._sent_bytes + size_bytes > self._limit_bytes or seq >= self._limit_chunks:
            await self._receive()
        self._sent_bytes += size_bytes
        for item in items_of(self._key, seq, chunk, is_inline=size_bytes <= self._inline_limit_bytes):
            await self._put(item)

    async def finish(self, chunks: Sequence[Chunk], digest: bytes) -> None:
        end = chunk_pb2.ChunkEnd(count=len(chunks), digest=digest)
        await self._put(Item(chunk=chunk_pb2.Chunk(key=self._key, seq=len(chunks), end=end)))
        while not self._is_committed:
            await self._receive()

    async def _put(self, item: Item) -> None:
        await self._call.write(stage_pb2.PutChunkRequest(items=[item]))

    async def _receive(self) -> None:
        for reply in (await self._call.read()).replies:
            match reply.WhichOneof("reply"):
                case "rejected":
                    raise FlowRejectedError(reply.rejected.error)
                case "opened":
                    self._window_bytes = reply.opened.window_bytes
                    self._limit_bytes, self._limit_chunks = (
                        reply.opened.credit_limit_bytes,
                        reply.opened.credit_limit_chunks,
                    )
                case "ack":
                    self._raise(reply.ack)
                case "credit":
                    self._raise(reply.credit)
                case "commit":
                    self._is_committed = True

    def _raise(self, grant: stage_pb2.ChunkAck | stage_pb2.CreditGrant) -> None:
        self._limit_bytes = max(self._limit_bytes, grant.credit_limit_bytes)
        self._limit_chunks = max(self._limit_chunks, grant.credit_limit_chunks)


async def send_on(
    key: chunk_pb2.EdgeKey, chunks: Sequence[Chunk], *, identity: Identity, endpoint: str, digest: bytes | None = None
) -> None:
    """Sends a flow to its end, and waits until the consumer has committed it.

    `digest` replaces the digest of the chunks. Raises FlowRejectedError if the consumer rejects the flow.
    """
    async with grpc.aio.insecure_channel(endpoint, options=LIMITS) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).PutChunk()
        sending = Sending(call, key, identity)
        await sending.open()
        for seq, chunk in enumerate(chunks):
            await sending.send(seq, chunk)
        await sending.finish(chunks, digest or digest_of([chunk.data for chunk in chunks]))
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
            region.offset, region.size_bytes = offset, len(each)
        offset += len(each)
    pieces = [
        chunk_pb2.ChunkFragment(
            key=key, seq=seq, total_bytes=len(content), offset=start, payload=content[start : start + (256 << 10)]
        )
        for start in range(0, 0 if is_inline else len(content), 256 << 10)
    ]
    return [*(Item(fragment=piece) for piece in pieces), Item(chunk=chunk_pb2.Chunk(key=key, seq=seq, data=data))]
