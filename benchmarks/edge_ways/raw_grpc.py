"""A raw gRPC byte stream: one long-lived stream of byte messages without protobuf, collected into a tensor.

Messages of 256 KiB were the fastest of 64 KiB to 2 MiB: from 384 KiB on, each buffer is newly mapped memory.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from benchmarks.edge_ways.base import Bytes, Receiver, Sender, target
from benchmarks.edge_ways.worker import receive

PIECE_BYTES = 256 << 10
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))


class RawGrpcSender(Sender):
    """Calls the receiver and writes messages."""

    async def open(self) -> None:
        self._channel = grpc.aio.insecure_channel(await receive(self.peers[0]), options=_OPTIONS)
        self._call = self._channel.stream_stream("/raw.Stream/Put", _as_is, _as_is)()
        await self._call.write(b"")

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, tensor: Bytes) -> None:
        payload = tensor.data
        for start in range(0, len(payload), PIECE_BYTES):
            await self._call.write(payload[start : start + PIECE_BYTES].tobytes())


class RawGrpcReceiver(Receiver):
    """Serves the stream and copies its messages into a tensor."""

    async def open(self) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._put, _as_is, _as_is)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw.Stream", {"Put": handler}),))
        port = self._server.add_insecure_port(f"{self.place.address}:0")
        self._stream: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._server.start()
        self.peers[0].send(f"{self.place.address}:{port}")
        await self._stream

    async def close(self) -> None:
        await self._server.stop(None)

    async def receive(self, size_bytes: int) -> Bytes:
        tensor = target(size_bytes)
        stream, end = self._stream.result(), 0
        while end < size_bytes:
            piece = await stream.read()
            start, end = end, end + len(piece)
            tensor[start:end] = np.frombuffer(piece, np.uint8)
        return tensor

    async def _put(self, _: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Passes the only stream to `receive` and keeps it open."""
        await context.read()
        self._stream.set_result(context)
        await asyncio.Event().wait()
        yield b""


def _as_is(message: bytes) -> bytes:
    return message
