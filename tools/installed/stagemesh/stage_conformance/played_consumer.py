"""The played consumers, whose PutChunk the stage calls."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.rpc.channels import SERVER_OPTIONS
from stagemesh.rpc.credentials import PROCESS
from stagemesh.rpc.error_mapping import error_from_wire, to_status
from stagemesh.stage_conformance.cases import Observed, brief, expect
from stagemesh.stage_conformance.content import FRAGMENT_BYTES, GRPC, PROTOCOL, Payload, ReceivedRows, digest_of
from stagemesh.v1 import chunk_pb2, stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol


@dataclass
class Received:
    """The part of a flow of the stage that has arrived, over all connections."""

    key: chunk_pb2.EdgeKey
    openings: list[int] = field(default_factory=list[int])
    chunks: list[Payload] = field(default_factory=list[Payload])
    arrivals: list[int] = field(default_factory=list[int])
    """The numbers of all chunks in the order in which they arrived, also of repeated ones."""
    fragments: bytearray = field(default_factory=bytearray)
    next_seq: int = 0
    size_bytes: int = 0
    demands: list[int] = field(default_factory=list[int])
    granted_bytes: int = 0
    """The limit that was granted for a demanded chunk."""
    rows: ReceivedRows = field(default_factory=ReceivedRows)
    end: chunk_pb2.ChunkEnd | None = None
    abort: StagemeshError | None = None


Ending: TypeAlias = StagemeshError | grpc.Status | grpc.StatusCode
"""The status with which a stream ends."""


class Connection:
    """A stream of the stage to a played consumer."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._writing = asyncio.Lock()
        self.hello: stage_pb2.Hello | None = None
        self.items: list[stage_pb2.PutItem] = []
        self.is_over = False
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    async def reply(self, *replies: stage_pb2.PutReply) -> None:
        """Sends replies."""
        await self.write(stage_pb2.PutChunkResponse(replies=replies))

    async def write(self, response: stage_pb2.PutChunkResponse) -> None:
        """Sends a message. Does nothing if the stream is over."""
        # gRPC drops a message that is written during another write.
        async with self._writing:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.BaseError):
                await self._context.write(response)

    def end(self, status: Ending) -> None:
        """Ends the stream with an error, or with another status."""
        if not self.ending.done():
            self.ending.set_result(status)


Answer = Callable[["Consumer", stage_pb2.PutItem], Iterable[stage_pb2.PutReply] | None]


def _by_default(_consumer: "Consumer", _item: stage_pb2.PutItem) -> None:
    """Leaves the answer to the consumer."""


class Consumer(Observed):
    """A played consumer. It receives flows as the protocol says, except for what a case changes.

    `producer` is the incarnation of the stage. Streams of other stages, which may still connect to a port that this
    consumer has got, are refused and not counted.
    """

    def __init__(self, name: str, host: str, producer: str) -> None:
        super().__init__()
        self.name, self._host, self._producer = name, host, producer
        self.incarnation = f"{name}/1"
        self.protocol: Protocol | None = PROTOCOL
        self.endpoint = ""
        self.connections: list[Connection] = []
        self.connection: Connection | None = None
        """The connection of the present item."""
        self.flows: dict[str, Received] = {}
        self.problems: list[str] = []
        """The violations of the protocol by the stage."""
        self.window_bytes, self.window_chunks, self.inline_limit_bytes = 8 << 20, 1024, 4096
        self.raises = True
        """Whether the limits grow with what arrives."""
        self.limit_bytes, self.limit_chunks = 0, 0
        """The limits of each flow if they do not grow."""
        self.welcomes = True
        """Whether Hello is answered."""
        self.answer: Answer = _by_default
        """Returns the replies to an item, or None for the replies of a good consumer."""
        self._server: grpc.aio.Server | None = None

    # -- the server

    async def start(self) -> None:
        """Serves PutChunk at a free port."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._put_chunk,
            request_deserializer=stage_pb2.PutChunkRequest.FromString,
            response_serializer=stage_pb2.PutChunkResponse.SerializeToString,
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("stagemesh.v1.StageService", {"PutChunk": handler}),)
        )
        port = _unused_port()
        tls, listen = PROCESS.credentials.tls, f"0.0.0.0:{port}"
        if tls is None:
            self._server.add_insecure_port(listen)
        else:
            self._server.add_secure_port(listen, tls.server_credentials(ask_certificate=True))
        await self._server.start()
        self.endpoint = f"{self._host}:{port}"

    async def stop(self) -> None:
        """Ends all streams, and frees the port."""
        if self._server is not None:
            for each in self.connections:
                each.end(grpc.StatusCode.UNAVAILABLE)
            await self._server.stop(0)

    async def _put_chunk(self, requests: AsyncIterator[stage_pb2.PutChunkRequest], context: Any) -> None:
        connection = Connection(context)
        reading = asyncio.create_task(self._read(requests, connection))
        try:
            await asyncio.wait((reading, connection.ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            (problem,) = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(problem, Exception) and not isinstance(problem, grpc.aio.BaseError):
                self.problems.append(f"an item that cannot be read: {problem!r}")
            connection.is_over = True
            self.note("a stream is over")
        if not connection.ending.done():
            return
        status = connection.ending.result()
        if status is grpc.StatusCode.OK:
            return
        if isinstance(status, StagemeshError):
            status = to_status(status)
        if isinstance(status, grpc.StatusCode):
            await context.abort(status, "ended by the conformance tool")
        else:
            await context.abort(status.code, status.details, status.trailing_metadata)

    async def _read(self, requests: AsyncIterator[stage_pb2.PutChunkRequest], connection: Connection) -> None:
        async for request in requests:
            if connection not in self.connections:
                if request.HasField("hello") and request.hello.incarnation != self._producer:
                    self.note(f"refused {request.hello.replica!r} with incarnation {request.hello.incarnation!r}")
                    connection.end(NotReadyError("this consumer is of another stage", reason="WRONG_PIPELINE"))
                    return
                self.connections.append(connection)
                self.note(f"stream {len(self.connections)} began")
            if request.HasField("hello"):
                connection.hello = request.hello
                self.note(f"hello of {request.hello.replica!r}")
                if self.welcomes:
                    await connection.write(stage_pb2.PutChunkResponse(welcome=self.welcome()))
            elif connection.hello is None:
                self.problems.append("a message without Hello came first")
            limit = self.protocol.max_message_bytes if self.protocol is not None else 0
            if limit and request.ByteSize() > limit:
                self.problems.append(f"a message of {request.ByteSize()} bytes, above max_message_bytes {limit}")
            for item in request.items:
                connection.items.append(item)
                self.connection = connection
                chosen = self.answer(self, item)
                replies = self.take(item) if chosen is None else chosen
                self.note(shown(item))
                if replies := list(replies):
                    await connection.reply(*replies)

    def welcome(self) -> stage_pb2.Welcome:
        """Returns the first answer of a stream."""
        return stage_pb2.Welcome(
            replica=self.name,
            incarnation=self.incarnation,
            protocol=self.protocol,
            inline_limit_bytes=self.inline_limit_bytes,
        )

    # -- a good consumer

    def flow(self, key: chunk_pb2.EdgeKey) -> Received:
        """Returns what has arrived of a flow."""
        return self.flows.setdefault(f"{key.request_id}#{key.attempt}", Received(key))

    def only(self) -> Received:
        """Returns what has arrived of the only flow."""
        expect(len(self.flows) == 1, "one flow", f"{len(self.flows)} flows; {self.came}")
        return next(iter(self.flows.values()))

    def take(self, item: stage_pb2.PutItem) -> Sequence[stage_pb2.PutReply]:
        """Receives an item, and returns the replies of a good consumer."""
        kind = item.WhichOneof("item")
        if kind in {None, "offer", "tickets"}:
            self.problems.append(f"an item of the kind {kind} without the feature for it")
            return []
        content = getattr(item, str(kind))
        flow = self.flow(content.key)
        match kind:
            case "open":
                return [self.opened(flow, content)]
            case "fragment":
                self._fragment(flow, content)
                return []
            case "demand":
                flow.demands.append(content.size_bytes)
                flow.granted_bytes = flow.size_bytes + content.size_bytes
                return [self.grant(flow, flow.granted_bytes)] if self.raises else []
            case _:
                return self._chunk(flow, content)

    def opened(self, flow: Received, item: stage_pb2.OpenEdge) -> stage_pb2.PutReply:
        """Returns the answer to `open`."""
        expected = flow.openings[-1] if flow.openings else 0
        if item.opening <= expected:
            self.problems.append(f"opening {item.opening} after {expected}")
        if item.connector != GRPC:
            self.problems.append(f"`open` with the connector {item.connector}")
        flow.openings.append(item.opening)
        flow.fragments.clear()
        return stage_pb2.PutReply(
            opened=stage_pb2.EdgeOpened(
                key=item.key,
                next_seq=flow.next_seq,
                credit_limit_bytes=self._limits(flow)[0],
                credit_limit_chunks=self._limits(flow)[1],
                window_bytes=self.window_bytes,
                connector=item.connector,
                opening=item.opening,
            )
        )

    def _limits(self, flow: Received) -> tuple[int, int]:
        if not self.raises:
            return self.limit_bytes, self.limit_chunks
        return max(flow.size_bytes + self.window_bytes, flow.granted_bytes), len(flow.chunks) + self.window_chunks

    def grant(self, flow: Received, limit_bytes: int | None = None, chunks: int | None = None) -> stage_pb2.PutReply:
        """Returns a grant of credit."""
        grant = stage_pb2.CreditGrant(key=flow.key, credit_limit_bytes=limit_bytes, credit_limit_chunks=chunks)
        return stage_pb2.PutReply(credit=grant)

    async def raise_limits(self, *, limit_bytes: int | None = None, chunks: int | None = None) -> None:
        """Raises the limits of the only flow, if they do not grow by themselves."""
        self.limit_bytes = self.limit_bytes if limit_bytes is None else limit_bytes
        self.limit_chunks = self.limit_chunks if chunks is None else chunks
        await self.connections[-1].reply(self.grant(self.only(), limit_bytes, chunks))

    def ack(self, flow: Received) -> stage_pb2.PutReply:
        """Returns the acknowledgement of everything that has arrived, with the present limits."""
        limits = self._limits(flow) if self.raises else (None, None)
        ack = stage_pb2.ChunkAck(
            key=flow.key, next_seq=flow.next_seq, credit_limit_bytes=limits[0], credit_limit_chunks=limits[1]
        )
        return stage_pb2.PutReply(ack=ack)

    def _fragment(self, flow: Received, item: chunk_pb2.ChunkFragment) -> None:
        if item.seq < flow.next_seq:
            return
        if len(item.payload) > FRAGMENT_BYTES:
            self.problems.append(f"a fragment of {len(item.payload)} bytes")
        if item.seq != flow.next_seq or item.offset != len(flow.fragments):
            self.problems.append(f"fragment of chunk {item.seq} at {item.offset}, not {len(flow.fragments)}")
        if flow.size_bytes + item.total_bytes > self._limits(flow)[0] and self.raises is False:
            self.problems.append(f"a fragment of chunk {item.seq} without credit")
        flow.fragments += item.payload

    def _chunk(self, flow: Received, chunk: chunk_pb2.Chunk) -> list[stage_pb2.PutReply]:
        flow.arrivals.append(chunk.seq)
        if not flow.openings:
            self.problems.append(f"chunk {chunk.seq} before `open`")
        if chunk.seq < flow.next_seq:
            return []
        if chunk.seq > flow.next_seq:
            self.problems.append(f"chunk {chunk.seq} after {flow.next_seq - 1}")
            return []
        flow.next_seq += 1
        match chunk.WhichOneof("content"):
            case "data":
                self._data(flow, chunk)
            case "end":
                flow.end = chunk.end
                data = [each.data for each in flow.chunks]
                if (chunk.end.count, chunk.end.digest) != (len(data), digest_of(data)):
                    self.problems.append(f"`end` with count {chunk.end.count} of {len(data)}, or another digest")
                return [self.ack(flow), stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=flow.key))]
            case "abort":
                flow.abort = error_from_wire(chunk.abort.error)
            case _:
                self.problems.append("a chunk without content")
        return [self.ack(flow)]

    def _data(self, flow: Received, chunk: chunk_pb2.Chunk) -> None:
        limit_bytes, limit_chunks = self._limits(flow)
        contents, data = list[bytes](), chunk.data
        for tensor in data.tensors:
            region, location = tensor.streamed, tensor.WhichOneof("location")
            inline = tensor.inline if location == "inline" else b""
            contents.append(
                bytes(flow.fragments[region.offset : region.offset + region.size_bytes])
                if location == "streamed"
                else inline
            )
            if location not in {"inline", "streamed", None}:
                self.problems.append(f"a tensor at {location} over grpc")
        flow.fragments.clear()
        payload = Payload(data, contents)
        if payload.size_bytes != data.size_bytes:
            self.problems.append(f"size_bytes {data.size_bytes} of a chunk with {payload.size_bytes} bytes")
        if any(each.HasField("inline") for each in data.tensors) and data.size_bytes > self.inline_limit_bytes:
            self.problems.append(f"a chunk of {data.size_bytes} bytes inline")
        if flow.size_bytes + data.size_bytes > limit_bytes or len(flow.chunks) + 1 > limit_chunks:
            self.problems.append(f"chunk {chunk.seq} without credit: {limit_bytes} bytes, {limit_chunks} chunks")
        if problem := flow.rows.problem_of(data):
            self.problems.append(problem)
        flow.size_bytes += data.size_bytes
        flow.chunks.append(payload)

    # -- for the cases

    async def arrived(self, find: Callable[[Received], Any], expected: str, *, within_s: float = 8.0) -> Received:
        """Waits until `find` returns a true value for one of the flows, and returns this flow."""
        return await self.until(
            lambda: next((flow for flow in self.flows.values() if find(flow)), None), expected, within_s=within_s
        )

    def check(self) -> None:
        """Raises MismatchError if the stage violated the protocol."""
        expect(not self.problems, "a flow as the protocol says", "; ".join(self.problems[:4]))

    def contents(self, request_id: str) -> dict[str, bytes]:
        """Returns the bytes of each tensor that arrived for a request, without repeated left context."""
        found: dict[str, bytes] = {}
        for flow in self.flows.values():
            for each in flow.chunks if flow.key.request_id == request_id else ():
                for tensor, content in zip(each.data.tensors, each.contents, strict=True):
                    rows = tensor.shape[0] if tensor.shape else 1
                    skipped = len(content) // rows * each.data.context_frames if rows else 0
                    found[tensor.name] = found.get(tensor.name, b"") + content[skipped:]
        return found


_USED_PORTS = set[int]()


def _unused_port() -> int:
    """Returns a free port that this process has not used before.

    The stage connects for seconds to the port of a consumer that has ended. Its flows would reach another case.
    """
    while True:
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
        if port not in _USED_PORTS:
            _USED_PORTS.add(port)
            return port


def shown(item: stage_pb2.PutItem) -> str:
    """Returns an item as one short line, without the bytes of its tensors."""
    kind = item.WhichOneof("item")
    if kind == "chunk":
        return f"chunk {item.chunk.seq} ({item.chunk.WhichOneof('content')}, {item.chunk.data.size_bytes} bytes)"
    if kind == "fragment":
        return f"fragment of chunk {item.fragment.seq} at {item.fragment.offset}"
    return brief(item)
