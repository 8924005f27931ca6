"""HTTP/2 connections that send any frames, also those that no gRPC client would send."""

import asyncio
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

GENERATE = "/stagemesh.v1.OrchestratorService/Generate"

ATTACKER = "127.0.0.2"
"""The address of the attacker: the other caller is on another host."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM, _END_HEADERS = 1, 4
_CANCEL = 8
MAX_FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def ping() -> bytes:
    """Returns a frame that the peer must answer."""
    return frame(_PING, 0, 0, bytes(8))


def reset(stream: int) -> bytes:
    """Returns a frame that cancels a stream."""
    return frame(_RESET, 0, stream, struct.pack(">I", _CANCEL))


def data(stream: int, payload: bytes, *, ends: bool = False) -> bytes:
    """Returns the frames with `payload`. With `ends`, the stream has no more data."""
    parts = [payload[start : start + MAX_FRAME_BYTES] for start in range(0, len(payload), MAX_FRAME_BYTES)] or [b""]
    last = len(parts) - 1
    return b"".join(frame(_DATA, _END_STREAM * (ends and n == last), stream, part) for n, part in enumerate(parts))


def headers(stream: int, path: str, more: Mapping[str, str] = {}) -> bytes:
    """Returns the frames that open a call of the RPC at `path`, with `more` headers."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "flood", "te": "trailers"}
    fields |= {"content-type": "application/grpc", **more}
    block = b"".join(_field(name, value) for name, value in fields.items())
    parts = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]
    continuation = 9
    frames = [frame(continuation if n else _HEADERS, 0, stream, part) for n, part in enumerate(parts[:-1])]
    frames.append(frame(continuation if frames else _HEADERS, _END_HEADERS, stream, parts[-1]))
    return b"".join(frames)


def message(payload: bytes, *, announced_bytes: int | None = None) -> bytes:
    """Returns a gRPC message with its prefix, which announces the length of `payload` or another one."""
    return b"\0" + struct.pack(">I", len(payload) if announced_bytes is None else announced_bytes) + payload


def _field(name: str, value: str) -> bytes:
    """Returns a header as a literal that is not indexed (RFC 7541, section 6.2.2)."""
    return b"\0" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    size, most = len(text), 127
    if size < most:
        return bytes([size]) + text.encode()
    prefix, rest = bytearray([most]), size - most
    while rest >= 128:
        prefix.append(rest % 128 + 128)
        rest //= 128
    prefix.append(rest)
    return bytes(prefix) + text.encode()


async def connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to `endpoint` ("host:port") from the attacker's address. Raises OSError if that is not possible."""
    host, _, port = endpoint.rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(ATTACKER, 0))


class Connection:
    """A connection that has sent the preface and its settings. It does not interpret what it receives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next_stream = 1

    @classmethod
    async def open(cls, endpoint: str) -> Self:
        """Connects to `endpoint` ("host:port"). Raises OSError if that is not possible."""
        connection = cls(*await connect(endpoint))
        await connection.send(PREFACE + frame(_SETTINGS, 0, 0, b""))
        return connection

    def new_stream(self) -> int:
        """Returns the number of the next stream."""
        self._next_stream += 2
        return self._next_stream - 2

    async def send(self, frames: bytes) -> None:
        """Sends frames. Waits while the peer does not read. Raises OSError if the connection is closed."""
        self._writer.write(frames)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Returns the next bytes from the peer. They are empty if it has closed the connection."""
        return await self._reader.read(1 << 16)

    async def discard(self) -> None:
        """Reads until the peer closes the connection."""
        while await self.receive():
            pass

    async def close(self) -> None:
        """Closes the connection."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
