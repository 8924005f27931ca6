"""What a stage process and its workers' processes say to each other: pickles, each after its length.

Both ends are this project's own code, over a pair of sockets that nobody else can reach.
"""

import pickle
import socket
import struct
from asyncio import IncompleteReadError, StreamReader
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.services.engines.diffusion.options import DiffusionOptions

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """The first message to a worker's process."""

    folder: Path
    options: DiffusionOptions
    rank: int
    store: Path
    """A file that is not there yet, by which the ranks find each other."""


@dataclass(frozen=True)
class RankCall:
    """A call of a method of `DiffusionWorker`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Reply:
    """What came of an order, or of the setup."""

    value: Any = None
    """Of rank 0 alone."""
    error: StagemeshError | None = None
    failures: tuple[str | None, ...] = ()
    """The reasons of what was raised or is among the values: the same at all ranks, or they have parted."""


def framed(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def received(reader: StreamReader) -> Any:
    """The next message; raises EOFError or OSError where the other end is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))  # noqa: S301  # see the module
    except IncompleteReadError as exc:
        raise EOFError from exc


def receive(connection: socket.socket) -> Any:
    """The next message, waited for; raises EOFError or OSError where the other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))  # noqa: S301  # see the module


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
