"""Runs the conformance kit for each built-in connector, and for a complete connector of another package.

The latter is what "Add a connector" in docs/extending.md describes. It reads the producer's arena through /proc, which
works within one pid namespace.
"""

import asyncio
import mmap
import os
import struct
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import numpy as np

from stagemesh.common.errors import InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.common.plugins.connectors import GRPC, NIXL, SHM, ConnectorDescriptor, ConnectorName
from stagemesh.conformance import ConnectorSuite, FlowSuite
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.arena.memory import PAGE_BYTES, TOKEN_BYTES, data_offset_in
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, FetchingReader, MemoryAccount, Producer


class TestShm(ConnectorSuite):
    connector = SHM


class TestNixl(ConnectorSuite):
    connector = NIXL


class TestGrpc(FlowSuite):
    connector = GRPC


_OFFER = struct.Struct(f"<II{TOKEN_BYTES}s")


class ProcReader(FetchingReader):
    def __init__(self, file: mmap.mmap, landing: Arena) -> None:
        self._file: Bytes | None = np.frombuffer(file, np.uint8)
        self._landing = landing

    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        if self._file is None:
            raise UnavailableError("this reader is closed")
        # Both outlive `close`, which may be called during a read.
        file = self._file
        _check(file, places)
        # Allocates all at once: a flow that waits for space while it holds some may wait forever.
        starts = list(accumulate((place.size_bytes for place in places), initial=0))
        landed = (await self._landing.allocate(starts[-1], account)).as_array()
        found = [landed[start : start + place.size_bytes] for start, place in zip(starts, places, strict=False)]
        await asyncio.to_thread(_copy, file, places, found)
        # Checked after the read, because the producer may have freed a region meanwhile.
        _check(file, places)
        return found

    async def close(self) -> None:
        self._file = None


def _copy(file: Bytes, places: Sequence[ArenaRange], into: Sequence[Bytes]) -> None:
    for (offset, size_bytes, _), copied in zip(places, into, strict=True):
        np.copyto(copied, file[offset : offset + size_bytes])


def _check(file: Bytes, places: Sequence[ArenaRange]) -> None:
    data_offset = data_offset_in(file.nbytes)
    generations = file[PAGE_BYTES:data_offset].view(np.uint64)
    for offset, size_bytes, generation in places:
        if not data_offset <= offset < file.nbytes or not 0 <= size_bytes <= file.nbytes - offset:
            raise InvalidChunkError(f"{size_bytes} bytes at {offset} lie outside their producer's arena")
        first, last = offset // PAGE_BYTES, (offset + max(size_bytes, 1) - 1) // PAGE_BYTES
        if not generation or not generations[first] == generations[last] == generation:
            raise InvalidChunkError("a range's region is no longer its own", reason="STALE_REGION")


class ProcConnector(Connector):
    name: ClassVar[ConnectorName] = "proc"

    def __init__(self, arena: Arena, *, landing: Callable[[], Awaitable[Arena]], **_: str) -> None:
        self._arena, self._landing = arena, landing

    async def offer(self) -> bytes:
        return _OFFER.pack(os.getpid(), self._arena.fd, self._arena.token)

    async def connect(self, offer: bytes, producer: Producer) -> ProcReader:
        try:
            file = _opened(offer)
        except (struct.error, OSError, ValueError) as exc:
            raise NotReadyError(
                f"the arena of {producer.replica} cannot be opened: {exc}", reason="CONNECTOR_UNAVAILABLE"
            ) from exc
        return ProcReader(file, await self._landing())

    async def close(self) -> None: ...


def _opened(offer: bytes) -> mmap.mmap:
    process_id, fd, token = _OFFER.unpack(offer)
    with Path(f"/proc/{process_id}/fd/{fd}").open("rb") as opened:
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if file[:TOKEN_BYTES] != token:
        raise ValueError("it is another one")
    return file


DESCRIPTOR = ConnectorDescriptor("proc", number=1000, rank=50, factory=f"{__name__}:ProcConnector")


class TestProc(ConnectorSuite):
    connector = "proc"
    descriptor = DESCRIPTOR
