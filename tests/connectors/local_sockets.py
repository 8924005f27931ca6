"""Abstract unix sockets in the form of local streams: a first byte with a descriptor, then length-prefixed messages."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Self

_LENGTH_BYTES = 4


class LocalSocket:
    """One socket; `with` closes it."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self.raw = raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    async def accept(self) -> "LocalSocket":
        """Accepts the next connection."""
        raw, _ = await asyncio.get_running_loop().sock_accept(self.raw)
        return LocalSocket(raw)

    def send_descriptor(self, descriptor: int) -> None:
        """Sends the first byte together with a descriptor."""
        socket.send_fds(self.raw, [b"\0"], [descriptor])

    async def receive_descriptor(self) -> int:
        """Receives the descriptor that is sent with the first byte. The caller closes it."""
        await _readable(self.raw)
        _, descriptors, _, _ = socket.recv_fds(self.raw, 1, 1)
        if not descriptors:
            raise ConnectionError("the stream did not begin with a descriptor")
        return descriptors[0]

    async def frames(self) -> AsyncIterator[bytes]:
        """Yields the messages up to the stream's end."""
        buffer = bytearray()
        while data := await self._receive():
            buffer += data
            while len(buffer) >= (end := _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "little")):
                yield bytes(buffer[_LENGTH_BYTES:end])
                del buffer[:end]

    async def write_frame(self, message: bytes) -> None:
        """Sends a message."""
        data = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        await asyncio.get_running_loop().sock_sendall(self.raw, data)

    async def _receive(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self.raw, 1 << 16)
        except ConnectionError:
            return b""


def listen(name: str) -> LocalSocket:
    """Yields a listening socket of a name, which is given without the leading NUL."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.bind(f"\0{name}")
    raw.listen()
    return LocalSocket(raw)


def connect(name: str) -> LocalSocket:
    """Connects to the listening socket of that name."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(f"\0{name}")
    return LocalSocket(raw)


async def _readable(raw: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(raw, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(raw)
