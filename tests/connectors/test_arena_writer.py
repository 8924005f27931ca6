"""Worker processes that write into their replica's arena."""

import asyncio
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from stagemesh.common.errors import DeadlineError, InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.common.plugins.connectors import SHM, ConnectorName
from stagemesh.common.wire.tensors import Array
from stagemesh.conformance import assert_same, open_flow, packet, receive_all, two_hosts
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.arena.memory import PAGE_BYTES
from stagemesh.connectors.arena.worker_writer import WRITER_SHIFT, ArenaWriter, Handle, PartitionAddress, PlacedTensor
from stagemesh.connectors.base import MemoryAccount
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.outlet import FanOut, Outlet
from stagemesh.connectors.packets import Packet
from tests.connectors import EACH_CONNECTOR
from tests.connectors.contents import write_tensors
from tests.rpc.call_errors import raises

MIB = 1 << 20
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module", autouse=True)
def unchanged_start_method() -> Iterator[None]:
    """Restores the default start method, which the start of any process sets."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * MIB)
    yield made
    made.close()


@contextmanager
def _worker(run: Callable[..., None], address: PartitionAddress) -> Iterator[tuple[Connection, int]]:
    """Runs a real worker process and yields the connection to it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield ours, process.pid
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _content(number: int) -> dict[str, Array]:
    rng = np.random.default_rng(number)
    size = int(rng.integers(1, 60_000))
    return {"n": np.array(number), "x": rng.integers(0, 255, (size, 3), np.uint8)}


def _write_packets(address: PartitionAddress, connection: Connection) -> None:
    writer = ArenaWriter(address)
    for number in range(1000):
        connection.send(write_tensors(writer, _content(number), 30))


def test_a_thousand_packets_of_a_worker_arrive_complete_and_in_order(arena: Arena) -> None:
    address = arena.open_partition(MIB)
    held: deque[Callable[[], None]] = deque()
    with _worker(_write_packets, address) as (connection, _):
        for number in range(1000):
            written = arena.adopt(connection.recv())
            expected = _content(number)
            assert written.tensors.keys() == expected.keys()
            assert all(np.array_equal(written.tensors[name], expected[name]) for name in expected)
            held.append(written.region.release)
            # Two held packets of at most 44 of the 256 pages always leave a gap for a third one.
            if len(held) > 2:
                held.rotate(number)
                held.popleft()()
    while held:
        held.popleft()()
    arena.close_partition(address)
    assert arena.used_bytes == 0


def _fill(address: PartitionAddress, connection: Connection) -> None:
    writer = ArenaWriter(address)
    try:
        while True:
            connection.send(write_tensors(writer, {"x": np.zeros(100_000, np.uint8)}, 0.2))
    except DeadlineError as exc:
        connection.send(str(exc))
    connection.recv()
    connection.send(write_tensors(writer, {"x": np.ones(100_000, np.uint8)}, 30))


def test_worker_waits_while_its_partition_is_full(arena: Arena) -> None:
    with _worker(_fill, arena.open_partition(MIB)) as (connection, _):
        handles: list[Handle] = []
        while isinstance(received := connection.recv(), Handle):
            handles.append(received)
        assert len(handles) == MIB // (25 * PAGE_BYTES)
        assert "raise its size" in received
        connection.send("go on")
        assert not connection.poll(0.05)
        arena.adopt(handles[4]).region.release()
        assert arena.adopt(connection.recv()).tensors["x"].all()


def _write_until_killed(address: PartitionAddress, connection: Connection) -> None:
    writer = ArenaWriter(address)
    while True:
        connection.send(write_tensors(writer, {"x": np.full(50_000, 7, np.uint8)}, 30))


def test_partition_of_a_killed_worker_is_freed_with_its_last_view(arena: Arena) -> None:
    address = arena.open_partition(MIB)
    with _worker(_write_until_killed, address) as (connection, process_id):
        held = arena.adopt(connection.recv())
        late: Handle = connection.recv()
        os.kill(process_id, 9)
    arena.close_partition(address)
    arena.close_partition(address)
    with pytest.raises(InvalidChunkError):
        arena.adopt(late)
    assert arena.used_bytes == held.region.size_bytes
    assert arena.max_region_bytes < arena.size_bytes // 2
    assert (held.tensors["x"] == 7).all()
    assert arena.find(held.tensors["x"]) is not None
    held.region.release()
    assert (arena.used_bytes, arena._regions) == (0, {})
    assert arena.max_region_bytes == arena.size_bytes // 2
    assert not any(arena._generations)


def _outlive_replica(address: PartitionAddress, connection: Connection) -> None:
    writer = ArenaWriter(address)
    connection.send("open")
    while True:
        try:
            write_tensors(writer, {"x": np.zeros(100_000, np.uint8)}, 30)
        except UnavailableError as exc:
            connection.send(str(exc))
            return


def _be_replica(_: PartitionAddress, connection: Connection) -> None:
    arena = Arena(4 * MIB)
    connection.send(arena.open_partition(MIB))
    connection.recv()


def test_worker_is_notified_when_its_replica_dies(arena: Arena) -> None:
    with _worker(_be_replica, arena.open_partition(PAGE_BYTES)) as (to_replica, replica_id):
        address: PartitionAddress = to_replica.recv()
        with _worker(_outlive_replica, address) as (to_worker, _):
            assert to_worker.recv() == "open"
            assert not to_worker.poll(1.0)
            os.kill(replica_id, 9)
            assert "has terminated" in to_worker.recv()


def test_adopted_region_is_shared_and_found_like_any_other(arena: Arena) -> None:
    with closing(ArenaWriter(arena.open_partition(MIB))) as writer:
        handle = write_tensors(writer, {"n": np.ones(3), "x": np.arange(5000.0)}, 1)
        written = arena.adopt(handle)
        found = arena.find(written.tensors["x"][100:])
        assert found == (written.region, handle.offset + 64 + 800)
        found.region.retain()
        written.region.release()
        with pytest.raises(DeadlineError):
            write_tensors(writer, {"x": np.zeros(MIB, np.uint8)}, 0)
        found.region.release()
        write_tensors(writer, {"x": np.zeros(MIB, np.uint8)}, 0)


def test_space_between_held_regions_is_used(arena: Arena) -> None:
    with closing(ArenaWriter(arena.open_partition(8 * PAGE_BYTES))) as writer:
        page: dict[str, Array] = {"x": np.zeros(PAGE_BYTES, np.uint8)}
        held = [arena.adopt(write_tensors(writer, page, 0)) for _ in range(8)]
        for free in (2, 3, 6):
            held[free].region.release()
        for size, free in ((2 * PAGE_BYTES, 2), (PAGE_BYTES, 6)):
            assert write_tensors(writer, {"x": np.zeros(size, np.uint8)}, 0).offset == held[free].region.offset


@pytest.mark.parametrize(
    "forge",
    [
        lambda handle: replace(handle, generation=handle.generation + 1),
        lambda handle: replace(handle, generation=0),
        lambda handle: replace(handle, generation=9 << WRITER_SHIFT),
        lambda handle: replace(handle, offset=handle.offset + PAGE_BYTES),
        lambda handle: replace(handle, offset=handle.offset + 64),
        lambda handle: replace(handle, offset=-PAGE_BYTES),
        lambda handle: replace(handle, offset=0),
        lambda handle: replace(handle, size_bytes=handle.size_bytes + PAGE_BYTES),
        lambda handle: replace(handle, size_bytes=1 << 62),
        lambda handle: replace(handle, size_bytes=0),
        lambda handle: replace(handle, tensors=(PlacedTensor("x", "float64", (1 << 40,), 0),)),
        lambda handle: replace(handle, tensors=(PlacedTensor("x", "float64", (1,), 1 << 40),)),
        lambda handle: replace(handle, tensors=(PlacedTensor("x", "float64", (-1, -1), 0),)),
        lambda handle: replace(handle, tensors=(PlacedTensor("x", "float64", (1,), -64),)),
        lambda handle: replace(handle, tensors=(PlacedTensor("x", "float64", (1,), 4),)),
        lambda handle: replace(handle, tensors=(PlacedTensor("x", "object", (1,), 0),)),
    ],
)
def test_forged_handle_is_rejected(arena: Arena, forge: Callable[[Handle], Handle]) -> None:
    arena.open_partition(MIB)
    with closing(ArenaWriter(arena.open_partition(MIB))) as writer:
        handle = write_tensors(writer, {"x": np.arange(1000.0)}, 1)
        with pytest.raises(InvalidChunkError):
            arena.adopt(forge(handle))
        written = arena.adopt(handle)
        with pytest.raises(InvalidChunkError, match="before"):
            arena.adopt(handle)
        written.region.release()
        with pytest.raises(InvalidChunkError, match="not its own"):
            arena.adopt(handle)


def test_packet_larger_than_the_partition_is_rejected(arena: Arena) -> None:
    with (
        closing(ArenaWriter(arena.open_partition(MIB))) as writer,
        pytest.raises(InvalidChunkError, match="partition") as caught,
    ):
        write_tensors(writer, {"x": np.zeros(MIB + 1, np.uint8)}, 1)
    assert caught.value.reason == "CHUNK_TOO_LARGE"


def test_partitions_leave_space_for_the_replica_itself(arena: Arena) -> None:
    with pytest.raises(NotReadyError, match="raise data_plane"):
        arena.open_partition(2 * MIB + 1)
    arena.open_partition(2 * MIB)
    assert arena.max_region_bytes == MIB
    assert all(arena.try_allocate(MIB, MemoryAccount()) for _ in range(2))
    with pytest.raises(NotReadyError):
        arena.open_partition(PAGE_BYTES)


@pytest.mark.parametrize("count", [10**8 - 1, 2**32 - 1, 2**47])
def test_generations_of_different_writers_never_coincide(arena: Arena, count: int) -> None:
    arena._generation = count
    regions = [arena.try_allocate(PAGE_BYTES, MemoryAccount()) for _ in range(3)]
    generations = {region.generation for region in regions if region}
    for _ in range(2):
        with closing(ArenaWriter(arena.open_partition(MIB))) as writer:
            writer._count = count
            generations |= {
                arena.adopt(write_tensors(writer, {"x": np.zeros(9)}, 1)).region.generation for _ in range(3)
            }
    assert len(generations) == 9


def test_address_of_a_closed_or_other_arena_is_rejected(arena: Arena) -> None:
    address = arena.open_partition(MIB)
    other = Arena(MIB)
    assert other.fd is not None
    with pytest.raises(NotReadyError, match="another replica"):
        ArenaWriter(replace(address, file_descriptor=other.fd))
    other.close()
    with pytest.raises(NotReadyError, match="cannot be opened"):
        ArenaWriter(replace(address, file_descriptor=10_000))


def test_a_worker_writes_on_after_the_arena_is_shared_but_no_other_starts(arena: Arena) -> None:
    with closing(ArenaWriter(arena.open_partition(MIB))) as writer:
        late = arena.open_partition(MIB)
        arena.share()
        adopted = arena.adopt(write_tensors(writer, {"x": np.arange(9)}, 1))
        assert adopted.tensors["x"].tolist() == list(range(9))
        with raises(NotReadyError, reason="ARENA_NOT_SHARED", match="cannot be opened"):
            ArenaWriter(late)


def test_release_during_a_write_is_safe(arena: Arena) -> None:
    """The replica clears pages while the worker searches for free ones: neither sees a partial change."""
    with closing(ArenaWriter(arena.open_partition(64 * PAGE_BYTES))) as writer:
        written: deque[Handle] = deque()

        def write() -> None:
            for number in range(2000):
                written.append(write_tensors(writer, {"x": np.full(number % 20_000 + 1, number % 251, np.uint8)}, 30))

        thread = threading.Thread(target=write)
        thread.start()
        for number in range(2000):
            while not written:
                thread.join(0.0005)
            adopted = arena.adopt(written.popleft())
            assert (adopted.tensors["x"] == number % 251).all()
            adopted.region.release()
        thread.join()


COUNT = 80
SLAB_BYTES = 6 * MIB
"""More bytes than the data plane keeps of delivered chunks, which is a quarter of the arena."""


def _write_flow(address: PartitionAddress, connection: Connection) -> None:
    writer = ArenaWriter(address)
    for seq in range(COUNT):
        connection.send(write_tensors(writer, packet(seq, 50_000).tensors, 30))


@asynccontextmanager
async def _writing(plane: DataPlane) -> AsyncIterator[Connection]:
    """Runs a worker that has opened its partition. From then on, consumers may receive the arena."""
    address = plane.arena.open_partition(SLAB_BYTES)
    with _worker(_write_flow, address) as (connection, _):
        assert await asyncio.to_thread(connection.poll, 30)
        yield connection
    plane.arena.close_partition(address)


async def _forward(plane: DataPlane, connection: Connection, outlet: Outlet | FanOut) -> None:
    """Sends the packets of a worker, which reuses its partition many times."""
    for seq in range(COUNT):
        handle: Handle = await asyncio.to_thread(connection.recv)
        await outlet.send(Packet(plane.arena.adopt(handle).held(), {"seq": seq}))
    await outlet.finish()


@EACH_CONNECTOR
async def test_packets_of_a_worker_are_copied_once(connector: ConnectorName) -> None:
    async with two_hosts() as (a, b):
        async with _writing(a.plane) as worker:
            outlet, inlet = open_flow(a, b, connector=connector)
            _, received = await asyncio.gather(_forward(a.plane, worker, outlet), receive_all(inlet))
        assert_same(received, [packet(seq, 50_000) for seq in range(COUNT)])
        assert outlet.attempt.connector == connector
        assert a.plane.arena.copied_bytes == 0
        await a.settled()


async def test_two_consumers_of_a_worker_need_no_copy() -> None:
    async with two_hosts() as (_, c), two_hosts() as (a, b):
        async with _writing(a.plane) as worker:
            fan_out = a.plane.fan_out()
            flows = [open_flow(a, consumer, request=f"r{n}") for n, consumer in enumerate((b, c))]
            for outlet, _ in flows:
                fan_out.add(outlet)
            reading = [receive_all(inlet) for _, inlet in flows]
            _, *received = await asyncio.gather(_forward(a.plane, worker, fan_out), *reading)
        for got in received:
            assert_same(got or [], [packet(seq, 50_000) for seq in range(COUNT)])
        assert a.plane.arena.copied_bytes == 0
        await a.settled()


async def test_packets_of_a_dead_worker_stay_intact() -> None:
    async with two_hosts() as (a, b):
        async with _writing(a.plane) as worker:
            outlet, inlet = open_flow(a, b, connector=SHM)
            tensors = a.plane.arena.adopt(await asyncio.to_thread(worker.recv)).held()
        await outlet.send(Packet(tensors, {"seq": 0}))
        del tensors
        _, received = await asyncio.gather(outlet.finish(), receive_all(inlet))
        assert_same(received, [packet(0, 50_000)])
        await a.settled()
