"""The shm connector: which reads it allows, and the lifetime of leases."""

import asyncio
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.common.plugins.connectors import SHM
from stagemesh.conformance import exchange, open_flow, packet, two_hosts
from stagemesh.connectors.arena.arena import Arena, Written
from stagemesh.connectors.arena.memory import PAGE_BYTES, SEALS, when_gone
from stagemesh.connectors.base import ArenaRange, MemoryAccount, Producer
from stagemesh.connectors.shm import ShmConnector, ShmReader
from stagemesh.v1 import stage_pb2
from tests.rpc.call_errors import raises

MIB = 1 << 20


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    made = Arena(MIB)
    yield made
    made.close()


async def _connect(arena: Arena) -> ShmReader:
    connector = ShmConnector(arena)
    return await connector.connect(await connector.offer(), Producer("a-0", "1", arena.fd))


async def _write(arena: Arena, size_bytes: int = 20_000) -> tuple[Written, ArenaRange]:
    written = await arena.write({"x": np.arange(size_bytes, dtype=np.uint8)}, MemoryAccount())
    return written, ArenaRange(written.region.offset, size_bytes, written.region.generation)


async def test_consumer_reads_written_data_in_place(arena: Arena) -> None:
    written, place = await _write(arena)
    reader = await _connect(arena)
    view = reader.view(place)
    np.testing.assert_array_equal(view, written.tensors["x"])
    written.tensors["x"][7] = 99
    assert view[7] == 99
    assert not view.flags.writeable


@pytest.mark.parametrize("count", [0, 10**8, 2**32 - 1])
async def test_freed_region_is_never_read_as_new_data(arena: Arena, count: int) -> None:
    arena._generation = count
    reader = await _connect(arena)
    written, old = await _write(arena)
    written.region.release()
    with pytest.raises(InvalidChunkError, match="was freed"):
        reader.view(old)
    again, place = await _write(arena)
    assert again.region.offset == old.offset
    with raises(InvalidChunkError, reason="STALE_REGION"):
        reader.view(old)
    assert reader.view(place).nbytes == 20_000


@pytest.mark.parametrize("changes", [{"token": b"x" * 16}, {"token": b""}, {"size_bytes": MIB}], ids=str)
async def test_arena_other_than_the_offered_one_is_rejected(arena: Arena, changes: dict[str, object]) -> None:
    offer = stage_pb2.ArenaAdvertisement.FromString(await ShmConnector(arena).offer())
    for name, value in changes.items():
        setattr(offer, name, value)
    with pytest.raises(NotReadyError, match="a-0"):
        await ShmConnector(arena).connect(offer.SerializeToString(), Producer("a-0", "1", arena.fd))


@contextmanager
def _handed_over(kind: str, size_bytes: int) -> Iterator[int]:
    """Returns a descriptor of a file that is not a sealed arena."""
    if kind == "socket":
        end, other = socket.socketpair()
        with end, other:
            yield end.fileno()
        return
    if kind == "closed":
        yield 10_000
        return
    is_file = kind == "file"
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR) if is_file else os.memfd_create("x", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        if kind == "other layout":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["unsealed", "file", "socket", "closed", "other layout"])
@pytest.mark.parametrize("size_bytes", [0, 100, 2 * PAGE_BYTES, 64 * PAGE_BYTES])
async def test_descriptor_of_anything_but_a_sealed_arena_is_rejected(arena: Arena, kind: str, size_bytes: int) -> None:
    offer = stage_pb2.ArenaAdvertisement(size_bytes=size_bytes, token=bytes(16)).SerializeToString()
    with _handed_over(kind, size_bytes) as fd, raises(NotReadyError, reason="CONNECTOR_UNAVAILABLE"):
        await ShmConnector(arena).connect(offer, Producer("a-0", "1", fd))


async def test_descriptor_remains_the_callers(arena: Arena) -> None:
    await (await _connect(arena)).close()
    assert arena.fd is not None
    assert os.fstat(arena.fd).st_size == arena.file_bytes


def test_lease_is_returned_once_with_the_last_view() -> None:
    memory = mmap.mmap(-1, PAGE_BYTES)
    tensors = [np.frombuffer(memory, np.uint8, 64, n * 64).view(np.int32).reshape(4, 4) for n in range(3)]
    views = [tensor[1:] for tensor in tensors]
    released: list[bool] = []
    when_gone(tensors, lambda: released.append(True))
    tensors.clear()
    views.pop()
    views.pop()
    assert not released
    views.pop()
    assert released == [True]


async def test_lease_is_returned_once_from_many_threads() -> None:
    released: list[bool] = []
    for _ in range(50):
        arrays = [np.zeros(4) for _ in range(8)]
        when_gone(arrays, lambda: released.append(True))
        halves = [arrays[:4], arrays[4:]]
        arrays.clear()
        threads = [threading.Thread(target=half.clear) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert len(released) == 50


async def test_arena_of_a_flow_cannot_be_opened_for_writing() -> None:
    async with two_hosts() as (a, b):
        await exchange(*open_flow(a, b, connector=SHM), [packet(1)])
        writable = os.open(f"/proc/self/fd/{a.plane.arena.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(writable, PAGE_BYTES)
            with pytest.raises(PermissionError):
                os.pwrite(writable, bytes(64), 0)
        finally:
            os.close(writable)
