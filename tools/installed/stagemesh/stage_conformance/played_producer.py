"""The played producers, which call PutChunk of the stage."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from stagemesh.common.errors import Code, StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import error_from_wire, from_rpc_error
from stagemesh.stage_conformance.cases import PEER, MismatchError, Observed, brief, expect, expect_error
from stagemesh.stage_conformance.content import GRPC, PROTOCOL, Inputs, Payload, digest_of, fragments_of
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc

if TYPE_CHECKING:
    from stagemesh.stage_conformance.trial import Trial


class Flow:
    """A flow into the stage, on one stream: its replies, and how chunks are sent."""

    def __init__(self, stream: "Stream", key: chunk_pb2.EdgeKey) -> None:
        self.stream, self.key = stream, key
        self.replies: list[stage_pb2.PutReply] = []
        self.sent: dict[int, chunk_pb2.ChunkData] = {}
        self.sent_bytes = self.limit_bytes = self.limit_chunks = self.acked = 0

    def take(self, reply: stage_pb2.PutReply) -> None:
        """Counts a reply."""
        self.replies.append(reply)
        content = getattr(reply, reply.WhichOneof("reply") or "opened")
        self.limit_bytes = max(self.limit_bytes, getattr(content, "credit_limit_bytes", 0))
        self.limit_chunks = max(self.limit_chunks, getattr(content, "credit_limit_chunks", 0))
        self.acked = max(self.acked, getattr(content, "next_seq", 0))

    def all(self, kind: str) -> list[Any]:
        """Returns the replies of a kind."""
        return [getattr(each, kind) for each in self.replies if each.WhichOneof("reply") == kind]

    async def put(self, **item: Any) -> None:
        """Sends one item."""
        await self.stream.put(stage_pb2.PutItem(**item))

    async def open(self, opening: int = 1, connector: int = GRPC) -> stage_pb2.EdgeOpened:
        """Opens the flow, and returns the answer `opened`."""
        await self.ask_open(opening, connector)
        return await self.opened(opening)

    async def ask_open(self, opening: int = 1, connector: int = GRPC) -> None:
        """Sends `open`."""
        await self.put(open=stage_pb2.OpenEdge(key=self.key, connector=connector, opening=opening))  # type: ignore[arg-type]

    async def opened(self, opening: int) -> stage_pb2.EdgeOpened:
        """Waits for `opened` with this number."""
        wanted = f"`opened` with opening {opening}"
        answer: stage_pb2.EdgeOpened = await self._until(
            lambda: next((each for each in self.all("opened") if each.opening == opening), None), wanted
        )
        return answer

    async def send(self, payload: Payload, seq: int | None = None, *, is_streamed: bool | None = None) -> None:
        """Sends a data chunk: inline if the stage's limit allows it, otherwise as fragments."""
        seq = len(self.sent) if seq is None else seq
        if is_streamed is None:
            is_streamed = payload.size_bytes > self.stream.inline_limit_bytes
        items = fragments_of(self.key, seq, b"".join(payload.contents)) if is_streamed else []
        for each in items:
            await self.stream.put(each)
        await self.send_data(payload.streamed() if is_streamed else payload.inline(), seq)

    async def send_data(self, data: chunk_pb2.ChunkData, seq: int) -> None:
        """Sends a data chunk as it is."""
        self.sent[seq] = data
        self.sent_bytes += data.size_bytes
        await self.put(chunk=chunk_pb2.Chunk(key=self.key, seq=seq, data=data))

    async def end(self, *, seq: int | None = None, count: int | None = None, digest: bytes | None = None) -> None:
        """Sends the end of the flow."""
        data = [self.sent[each] for each in sorted(self.sent)]
        end = chunk_pb2.ChunkEnd(
            count=len(data) if count is None else count, digest=digest_of(data) if digest is None else digest
        )
        await self.put(chunk=chunk_pb2.Chunk(key=self.key, seq=len(data) if seq is None else seq, end=end))

    async def abort(self, error: chunk_pb2.Error) -> None:
        """Sends `abort` with this error, under the next number."""
        abort = chunk_pb2.ChunkAbort(error=error)
        await self.put(chunk=chunk_pb2.Chunk(key=self.key, seq=len(self.sent), abort=abort))

    async def acknowledged(self, next_seq: int, *, within_s: float = 8.0) -> None:
        """Waits until the chunks below this number are acknowledged."""
        await self._until(lambda: self.acked >= next_seq, f"`ack` with next_seq {next_seq}", within_s=within_s)

    async def committed(self) -> None:
        """Waits for `commit`."""
        await self._until(lambda: self.all("commit"), "`commit`", within_s=15.0)

    async def rejected(self, code: Code | None, *reasons: str, count: int = 1, within_s: float = 8.0) -> StagemeshError:
        """Waits until `rejected` has arrived this number of times, with this error. Returns the error."""
        wanted = f"`rejected` {code.name if code else ''} {' or '.join(reasons)}".strip()
        await self.stream.until(
            lambda: len(self.all("rejected")) >= count or self.stream.ended, wanted, within_s=within_s
        )
        expect(len(self.all("rejected")) >= count, wanted, self.stream.came)
        error = error_from_wire(self.all("rejected")[-1].error)
        expect_error(error, code, *reasons)
        return error

    async def _until(self, find: Callable[[], Any], expected: str, *, within_s: float = 8.0) -> Any:
        """Waits until `find` returns a true value. Fails at once if the flow is rejected or the stream has ended."""
        rejected = len(self.all("rejected"))
        await self.stream.until(
            lambda: find() or len(self.all("rejected")) > rejected or self.stream.ended, expected, within_s=within_s
        )
        found = find()
        expect(found, expected, self.stream.came)
        return found


class Stream(Observed):
    """A stream of a played producer to the stage."""

    def __init__(self, call: Any, inputs: Inputs) -> None:
        super().__init__()
        self.call, self.inputs = call, inputs
        self.welcome: stage_pb2.Welcome | None = None
        self.flows: list[Flow] = []
        self.others: list[stage_pb2.PutReply] = []
        self.ended = False
        self.error: StagemeshError | None = None
        self.task = asyncio.create_task(self._read())

    @property
    def inline_limit_bytes(self) -> int:
        """The largest chunk that is sent inline."""
        return min(self.welcome.inline_limit_bytes, 4096) if self.welcome is not None else 0

    async def _read(self) -> None:
        try:
            async for response in self.call:
                if response.HasField("welcome"):
                    self.welcome = response.welcome
                    self.note(f"welcome of {response.welcome.replica!r}")
                for reply in response.replies:
                    self._take(reply)
        except grpc.aio.AioRpcError as exc:
            self.error = from_rpc_error(exc, peer=PEER)
            self.note(f"the stream ended: {self.error.code.name} {self.error.reason}: {self.error.message}")
        except asyncio.CancelledError:
            self.note("the stream was cancelled by this tool")
        self.ended = True
        self.note("the stream is over")

    def _take(self, reply: stage_pb2.PutReply) -> None:
        kind = reply.WhichOneof("reply")
        key = getattr(reply, str(kind)).key if kind and hasattr(getattr(reply, kind), "key") else None
        # The flow that was created last, if a case creates a flow again.
        flow = next((each for each in reversed(self.flows) if each.key == key), None)
        if flow is not None:
            flow.take(reply)
        else:
            self.others.append(reply)
        self.note(brief(reply))

    def flow(self, key: chunk_pb2.EdgeKey) -> Flow:
        """Returns a flow with this key on this stream, without opening it."""
        self.flows.append(Flow(self, key))
        return self.flows[-1]

    async def open(self, key: chunk_pb2.EdgeKey, opening: int = 1) -> Flow:
        """Opens a flow."""
        flow = self.flow(key)
        await flow.open(opening)
        return flow

    async def put(self, *items: stage_pb2.PutItem, hello: stage_pb2.Hello | None = None) -> None:
        """Sends a message. Does nothing if the stream has ended."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self.call.write(stage_pb2.PutChunkRequest(hello=hello, items=items))

    async def refused(self, code: Code | None, *reasons: str, within_s: float = 8.0) -> None:
        """Waits until the stage has ended the stream with this error."""
        wanted = f"the end of the stream with {code.name if code else 'an error'} {' or '.join(reasons)}".strip()
        await self.until(lambda: self.ended, wanted, within_s=within_s)
        if self.error is None:
            raise MismatchError(wanted, self.came)
        expect_error(self.error, code, *reasons)

    def cut(self) -> None:
        """Breaks the stream."""
        self.call.cancel()


class Producer:
    """A played producer with one incarnation."""

    def __init__(self, name: str, incarnation: str, trial: "Trial") -> None:
        self.name, self.incarnation = name, incarnation
        self._stage, self._trial = trial.stage, trial

    def hello(self, **changes: Any) -> stage_pb2.Hello:
        """Returns the first message of a stream, with other values of some fields."""
        described = self._stage.described
        fields: dict[str, Any] = {
            "replica": self.name,
            "incarnation": self.incarnation,
            "pipeline": described.pipeline,
            "generation": described.generation,
            "protocol": PROTOCOL,
        }
        return stage_pb2.Hello(**{**fields, **changes})

    async def raw_stream(self) -> Stream:
        """Opens a stream on a new connection, and sends nothing."""
        channel = open_channel(self._stage.endpoint)
        self._trial.stack.push_async_callback(channel.close)
        stream = Stream(stage_pb2_grpc.StageServiceStub(channel).PutChunk(), self._stage.inputs)
        self._trial.observe("stream", stream)

        async def end() -> None:
            stream.task.cancel()
            stream.cut()
            await asyncio.gather(stream.task, return_exceptions=True)

        self._trial.stack.push_async_callback(end)
        return stream

    async def stream(self) -> Stream:
        """Opens a stream, and waits for Welcome."""
        stream = await self.raw_stream()
        await stream.put(hello=self.hello())
        await stream.until(lambda: stream.welcome or stream.ended, "`welcome`", within_s=5.0)
        expect(stream.welcome is not None, "`welcome`", stream.came)
        return stream
