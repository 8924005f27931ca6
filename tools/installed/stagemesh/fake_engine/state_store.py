"""The state that fake stages hand over: bytes in the producer's process, which consumers read over a unix socket.

The store counts how its states are used, so that tests notice a state that is never released, and a state that is
released while it is read.
"""

import asyncio
import itertools
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from stagemesh.common.errors import InvalidRequestError, UnavailableError
from stagemesh.connectors.packets import OfferedTicket
from stagemesh.fake_engine import KIND

_GONE = b"\xff" * 8
_REQUEST_S = 5.0
_numbers = itertools.count(1)


@dataclass
class StateCounts:
    """The numbers of states of a store."""

    offered: int = 0
    released: int = 0
    reads: int = field(default=0, compare=False)
    """The number of reads that began before the state was released."""
    refused_reads: int = 0
    """The number of reads that began after the state was released."""
    cut_reads: int = 0
    """The number of reads during which the state was released."""


class StateStore:
    """The states of one fake engine, and the socket at which other processes of this host read them."""

    def __init__(self) -> None:
        self.address = socket_address(os.getpid(), next(_numbers))
        self.counts = StateCounts()
        self._states: dict[int, bytes] = {}
        self._ids = itertools.count(1)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begins to serve the states."""
        self._server = await asyncio.start_unix_server(self._serve, self.address)

    async def close(self) -> None:
        """Stops to serve the states. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def offer(self, content: bytes, *, time_limit_s: float) -> OfferedTicket:
        """Adds a state. Returns the ticket that keeps it."""
        number = next(self._ids)
        self._states[number] = content
        self.counts.offered += 1
        descriptor = json.dumps({"socket": self.address[1:], "state": number}).encode()
        return OfferedTicket(
            KIND,
            descriptor,
            size_bytes=len(content),
            time_limit_s=time_limit_s,
            on_release=lambda: self._release(number),
        )

    def _release(self, number: int) -> None:
        del self._states[number]
        self.counts.released += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = json.loads(await reader.readline())
            with suppress(OSError):
                if request.get("counts"):
                    writer.write(json.dumps(asdict(self.counts)).encode())
                else:
                    await self._send(reader, writer, number=request["state"], pause_s=request["pause_s"])
                await writer.drain()
        finally:
            writer.close()

    async def _send(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, number: int, pause_s: float
    ) -> None:
        content = self._states.get(number)
        if content is None:
            self.counts.refused_reads += 1
            writer.write(_GONE)
            return
        self.counts.reads += 1
        half = len(content) // 2
        writer.write(len(content).to_bytes(8) + content[:half])
        await writer.drain()
        await asyncio.sleep(pause_s)
        if number not in self._states:
            # The state of a dead reader may be released.
            self.counts.cut_reads += not reader.at_eof()
            return
        writer.write(content[half:])


def socket_address(process_id: int, number: int = 1) -> str:
    """Returns the abstract address at which the `number`-th store of a process is served."""
    return f"\0stagemesh-fake-state-{process_id}-{number}"


async def read_state(descriptor: bytes, *, pause_s: float = 0.0) -> bytes:
    """Reads the state to which a ticket's descriptor refers. Pauses for `pause_s` seconds in the middle.

    The caller must limit the time. Raises InvalidRequestError (INVALID_TICKET) if the descriptor cannot be read, and
    UnavailableError (TICKET_LOST) if the state cannot be read.
    """
    address, number = _parsed(descriptor)
    try:
        reader, writer = await _connect(address)
        try:
            writer.write(json.dumps({"state": number, "pause_s": pause_s}).encode() + b"\n")
            length = await reader.readexactly(8)
            if length == _GONE:
                raise _lost("it has been released")
            return await reader.readexactly(int.from_bytes(length))
        finally:
            writer.close()
    except (OSError, EOFError) as exc:
        raise _lost(f"{type(exc).__name__}: {exc}") from exc


async def read_counts(process_id: int, number: int = 1) -> StateCounts:
    """Returns the counts of the `number`-th store of a process. Raises OSError if the process has no such store."""
    reader, writer = await _connect(socket_address(process_id, number))
    try:
        writer.write(b'{"counts": true}\n')
        return StateCounts(**json.loads(await reader.read()))
    finally:
        writer.close()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    # uvloop connects only sockets of its own to addresses in the file system.
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, address)
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


def _parsed(descriptor: bytes) -> tuple[str, int]:
    try:
        content = json.loads(descriptor)
    except ValueError:
        content = None
    match content:
        case {"socket": str(name), "state": int(number)}:
            return f"\0{name}", number
        case _:
            raise InvalidRequestError(
                f"the descriptor {descriptor[:64]!r} of a ticket of kind {KIND} is not one of a fake stage",
                reason="INVALID_TICKET",
            )


def _lost(cause: str) -> UnavailableError:
    return UnavailableError(f"the state of a ticket of kind {KIND} cannot be read: {cause}", reason="TICKET_LOST")
