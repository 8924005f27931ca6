"""Message streams: gRPC and local unix sockets behind one interface, with the same messages on both.

`ClientStream` and `ServerStream` are the two ends of a gRPC stream, such as PutChunk. `LocalStream` is either end of a
unix socket between replicas on one host. It prefixes each message with its length, and needs no thread and no HTTP/2.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeAlias, cast

import grpc

from stagemesh.common.errors import InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import from_rpc_error

PUT_CHUNK = "/stagemesh.v1.StageService/PutChunk"
_LENGTH_BYTES = 4
_AHEAD = 1
"""Messages that may wait for gRPC beside the one that it sends."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class StreamHandler(Protocol):
    """What a lane calls, on the event loop."""

    def received(self, data: bytes) -> None:
        """A message has come. A StagemeshError that is raised ends the lane with it."""

    def writable(self) -> None:
        """The lane takes messages again."""

    def closed(self, error: StagemeshError | None) -> None:
        """The lane is over, once; None where the other end closed it in order."""


class MessageStream(Protocol):
    """One end of a stream of messages."""

    @property
    def is_writable(self) -> bool:
        """Whether `write` may be called: False until the user hears `writable`."""
        ...

    def write(self, data: bytes) -> None:
        """Sends a message."""

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends the lane, telling the other end why where it can. Closing twice is harmless."""


class LocalStream(asyncio.Protocol):
    """Either end of a local stream, as the protocol of a connected unix socket."""

    def __init__(self, user: StreamHandler, *, peer: str) -> None:
        self._user, self._peer = user, peer
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._error: StagemeshError | None = None
        self.is_writable = False

    def write(self, data: bytes) -> None:
        """See `MessageStream`."""
        assert self._transport is not None, "a lane is used once it is connected"
        self._transport.writelines((len(data).to_bytes(_LENGTH_BYTES, "little"), data))

    def close(self, error: StagemeshError | None = None) -> None:
        """See `MessageStream`."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        # Both loops give a stream socket a stream transport; uvloop's is of no class of asyncio's.
        self._transport, self.is_writable = cast("asyncio.Transport", transport), True

    def pause_writing(self) -> None:
        """The other end reads too slowly."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """The other end has caught up."""
        self.is_writable = True
        self._user.writable()

    def data_received(self, data: bytes) -> None:
        """Bytes have come: some messages, or a part of one."""
        self._buffer += data
        try:
            while (message := self._next_message()) is not None:
                self._user.received(message)
        except StagemeshError as exc:
            self.close(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self.is_writable = False
        if exc is not None:
            self._error = self._error or UnavailableError(f"the local stream with {self._peer} broke: {exc}")
        self._user.closed(self._error)

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        if size > MAX_MESSAGE_BYTES:
            raise InvalidChunkError(f"{self._peer} announced a message of {size} bytes; {MAX_MESSAGE_BYTES} are taken")
        end = _LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        message = bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return message


class ClientStream:
    """The calling end of a stream: a producer's, for PutChunk. `run` carries it."""

    def __init__(self, channel: grpc.aio.Channel, user: StreamHandler, *, peer: str, method: str = PUT_CHUNK) -> None:
        self._user, self._peer = user, peer
        self._call: _Call = channel.stream_stream(method, None, None)()
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._finished = False

    @property
    def is_writable(self) -> bool:
        """See `MessageStream`."""
        return len(self._outgoing) < _AHEAD

    def write(self, data: bytes) -> None:
        """See `MessageStream`."""
        self._outgoing.append(data)
        self._wake.set()

    def finish(self) -> None:
        """Nothing more is written; what comes is read to its end."""
        self._finished = True
        self._wake.set()

    def close(self, error: StagemeshError | None = None) -> None:  # noqa: ARG002 - a client has no status to give
        """See `MessageStream`."""
        self._call.cancel()

    async def run(self) -> None:
        """Carries messages until the stream ends, and tells the user."""
        error: StagemeshError | None = None
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A failed write leaves a status of its own making on the call, so the writer speaks first.
            await next(task for task in tasks if task.done())
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc, peer=self._peer)
        except StagemeshError as exc:
            error = exc
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._user.closed(error)

    async def _read(self) -> None:
        while isinstance(data := await self._call.read(), bytes):
            self._user.received(data)
            # It may be large, and the next one far away.
            del data
        await self._call.code()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._outgoing or not self._finished:
                if not self._outgoing:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                data = self._outgoing.popleft()
                # The next message is made while gRPC sends this one.
                loop.call_soon(self._user.writable)
                await self._call.write(data)
                del data
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as exc:
            raise UnavailableError(f"the connection to {self._peer} broke") from exc
        # The stream ends with what is read.
        await asyncio.Event().wait()


class ServerStream:
    """The serving end of a stream: a consumer's, for PutChunk. `serve` carries it."""

    def __init__(self, user: StreamHandler) -> None:
        self._user = user
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._error: StagemeshError | None = None
        self._over = False

    @property
    def is_writable(self) -> bool:
        """See `MessageStream`."""
        return len(self._outgoing) < _AHEAD

    def write(self, data: bytes) -> None:
        """See `MessageStream`."""
        self._outgoing.append(data)
        self._wake.set()

    def close(self, error: StagemeshError | None = None) -> None:
        """See `MessageStream`."""
        self._error, self._over = self._error or error, True
        self._wake.set()

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """The messages for the caller, until the stream ends; raises what `close` was given."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while not self._over or self._outgoing:
                if not self._outgoing:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                yield self._outgoing.popleft()
                self._user.writable()
            if self._error is not None:
                raise self._error
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._user.closed(self._error)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for data in requests:
                # gRPC gets the next message while this one is taken in.
                loop.call_soon(self._take, data)
                del data
        finally:
            loop.call_soon(self.close)

    def _take(self, data: bytes) -> None:
        try:
            if not self._over:
                self._user.received(data)
        except StagemeshError as exc:
            self.close(exc)
