"""Abstract unix sockets as local streams use them: messages with their length before them, descriptors beside them."""

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Self

_LENGTH_BYTES = 4
_MAX_DESCRIPTORS = 4


class LocalSocket:
    """One socket; `with` closes it."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self.raw = raw
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    async def accept(self) -> "LocalSocket":
        """The next connection."""
        raw, _ = await asyncio.get_running_loop().sock_accept(self.raw)
        return LocalSocket(raw)

    async def frames(self, *, pass_descriptors_to: "LocalSocket | None" = None) -> AsyncIterator[bytes]:
        """The messages up to the stream's end; descriptors that come along go out with the other socket's next one."""
        buffer = bytearray()
        while data := await self._receive(pass_descriptors_to or self):
            buffer += data
            while len(buffer) >= (end := _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "little")):
                yield bytes(buffer[_LENGTH_BYTES:end])
                del buffer[:end]

    async def write_frame(self, message: bytes) -> None:
        """Sends a message, and the descriptors that wait to go along."""
        data = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        if self._descriptors:
            sent = socket.send_fds(self.raw, [data], self._descriptors)
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()
            data = data[sent:]
        await asyncio.get_running_loop().sock_sendall(self.raw, data)

    def attach(self, descriptors: list[int]) -> None:
        """Has descriptors, which are given away, go along with the next message."""
        self._descriptors += descriptors

    async def _receive(self, taker: "LocalSocket") -> bytes:
        await _readable(self.raw)
        received = array.array("i")
        try:
            data, ancillary, _, _ = self.raw.recvmsg(1 << 16, socket.CMSG_SPACE(_MAX_DESCRIPTORS * received.itemsize))
        except ConnectionError:
            return b""
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(payload)
        taker.attach(list(received))
        return data


def listen(name: str) -> LocalSocket:
    """A listening socket of that name, without the leading NUL."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.bind(f"\0{name}")
    raw.listen()
    return LocalSocket(raw)


def connect(name: str) -> LocalSocket:
    """A connection to the listening socket of that name."""
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
