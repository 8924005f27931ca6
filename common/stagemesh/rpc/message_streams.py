"""Message streams, which provide one interface to gRPC streams and to local unix sockets.

`ClientStream` and `ServerStream` are the two sides of a gRPC stream, for example of PutChunk. `LocalStream` is either
side of a unix socket between replicas on one host. A local stream prefixes each message with the message's length, and
needs neither threads nor HTTP/2.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeAlias, cast

import grpc

from stagemesh.common.errors import InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.common.tasks import end_tasks
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import from_ended_stream

PUT_CHUNK = "/stagemesh.v1.StageService/PutChunk"
_LENGTH_BYTES = 4

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class StreamHandler(Protocol):
    """A handler of the events of a message stream. All methods are called on the event loop."""

    def received(self, data: bytes) -> None:
        """Called for each received message. If this method raises a StagemeshError, the stream ends with that error."""

    def writable(self) -> None:
        """Called when the stream can accept a further message, so that `MessageStream.write` may be called again."""

    def closed(self, error: StagemeshError | None) -> None:
        """Called once when the stream has ended. `error` is None if the stream ended normally."""


class MessageStream(Protocol):
    """One side of a bidirectional stream of messages."""

    @property
    def is_writable(self) -> bool:
        """Whether `write` may be called.

        If it is False, the stream calls `StreamHandler.writable` when it becomes True.
        """
        ...

    def write(self, data: bytes) -> None:
        """Sends a message without waiting for its delivery. Call this method only if `is_writable` is True."""

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends the stream. Only a ServerStream sends `error` to the peer. Idempotent."""


class LocalStream(asyncio.Protocol):
    """One side of a local stream, implemented as the asyncio protocol of a connected unix socket."""

    def __init__(self, handler: StreamHandler, *, peer: str) -> None:
        self._handler, self._peer = handler, peer
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._error: StagemeshError | None = None
        self.is_writable = False

    def write(self, data: bytes) -> None:
        assert self._transport is not None, "connect a stream before using it"
        self._transport.writelines((len(data).to_bytes(_LENGTH_BYTES, "little"), data))

    def close(self, error: StagemeshError | None = None) -> None:
        self._error = self._error or error
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Both event loops pass a stream transport here, but uvloop's class does not derive from asyncio.Transport.
        self._transport, self.is_writable = cast("asyncio.Transport", transport), True

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._handler.writable()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := self._next_message()) is not None:
                self._handler.received(message)
        except StagemeshError as exc:
            self.close(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_writable = False
        if exc is not None:
            self._error = self._error or UnavailableError(
                f"the local stream with {self._peer} broke: {exc}", reason="CONNECTION_LOST"
            )
        self._handler.closed(self._error)

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        if size > MAX_MESSAGE_BYTES:
            raise InvalidChunkError(
                f"{self._peer} announced a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are accepted"
            )
        end = _LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        message = bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return message


class _GrpcStream:
    """Base class of both sides of a gRPC stream. Owns the queue of outgoing messages."""

    def __init__(self, handler: StreamHandler) -> None:
        self._handler = handler
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._finished = False

    @property
    def is_writable(self) -> bool:
        # In addition to the message that is being sent, one message may wait.
        return not self._outgoing

    def write(self, data: bytes) -> None:
        self._outgoing.append(data)
        self._wake.set()

    def finish(self) -> None:
        """Ends the stream after the queue is empty. Messages that are written until then are still sent."""
        self._finished = True
        self._wake.set()

    async def _next(self) -> bytes | None:
        """Waits for the next outgoing message and returns it, or returns None after the last message."""
        while not self._outgoing:
            if self._finished:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._outgoing.popleft()


class ClientStream(_GrpcStream):
    """The client side of a gRPC stream. `run` sends and receives the stream's messages.

    In PutChunk, the producer is the client.
    """

    def __init__(
        self, channel: grpc.aio.Channel, handler: StreamHandler, *, peer: str, method: str = PUT_CHUNK
    ) -> None:
        super().__init__(handler)
        self._peer = peer
        self._call: _Call = channel.stream_stream(method, None, None)()

    def close(self, error: StagemeshError | None = None) -> None:  # noqa: ARG002 - a client cannot send a status
        self._call.cancel()

    async def run(self) -> None:
        """Sends and receives messages until the stream ends. Then calls the handler's `closed` method."""
        error: StagemeshError | None = None
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A failed write sets its own status on the call, so the writer's error is raised first.
            await next(task for task in tasks if task.done())
        except grpc.aio.AioRpcError as exc:
            error = from_ended_stream(exc, peer=self._peer)
        except StagemeshError as exc:
            error = exc
        finally:
            self._call.cancel()
            await end_tasks(tasks)
            self._handler.closed(error)

    async def _read(self) -> None:
        while isinstance(data := await self._call.read(), bytes):
            self._handler.received(data)
            # The message may be large, and a long time may pass until the next one.
            del data
        await self._call.code()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (data := await self._next()) is not None:
                # The handler prepares the next message while gRPC sends this one.
                loop.call_soon(self._handler.writable)
                await self._call.write(data)
                del data
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as exc:
            raise UnavailableError(f"the connection to {self._peer} broke", reason="CONNECTION_LOST") from exc
        # Waits, because the reader ends the stream.
        await asyncio.Event().wait()


class ServerStream(_GrpcStream):
    """The server side of a gRPC stream. `serve` sends and receives the stream's messages.

    In PutChunk, the consumer is the server.
    """

    def __init__(self, handler: StreamHandler) -> None:
        super().__init__(handler)
        self._error: StagemeshError | None = None

    def close(self, error: StagemeshError | None = None) -> None:
        self._error = self._error or error
        self.finish()

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Yields the outgoing messages until the stream ends. Passes the messages in `requests` to the handler.

        At the end, raises the error that was passed to `close`, unless that error is None.
        """
        reader = asyncio.create_task(self._read(requests))
        try:
            while (data := await self._next()) is not None:
                yield data
                del data
                self._handler.writable()
            if self._error is not None:
                raise self._error
        finally:
            await end_tasks([reader])
            self._handler.closed(self._error)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for data in requests:
                # gRPC receives the next message while the handler processes this one.
                loop.call_soon(self._take, data)
                del data
        finally:
            loop.call_soon(self.close)

    def _take(self, data: bytes) -> None:
        try:
            if not self._finished:
                self._handler.received(data)
        except StagemeshError as exc:
            self.close(exc)
