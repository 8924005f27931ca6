"""The arena: allocation, waiting order and fair shares, copies, holders."""

import asyncio
import fcntl
import gc
import mmap
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagemesh.common.errors import InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.common.wire.tensors import Array
from stagemesh.conformance import until
from stagemesh.connectors.arena import memory
from stagemesh.connectors.arena.arena import COPY_IN_THREAD_BYTES, Arena, Region
from stagemesh.connectors.arena.memory import PAGE_BYTES, layout_of, pages_are_of, pin_if_cuda
from stagemesh.connectors.base import MemoryAccount
from tests.limits import files_of_at_most
from tests.rpc.call_errors import raises

MIB = 1 << 20
PAGES = 64


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    made = Arena(MIB)
    yield made
    made.close()


def _region(arena: Arena, size_bytes: int, account: MemoryAccount | None = None) -> Region:
    region = arena.try_allocate(size_bytes, account or MemoryAccount())
    assert region is not None
    return region


class ArenaModel(RuleBasedStateMachine):
    """Compares the arena with plain lists: regions of three flows, waiting allocations, retained regions."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.arena = Arena(PAGES * PAGE_BYTES)
        self.arena.on_pressure = self.press
        self.accounts = [MemoryAccount() for _ in range(3)]
        self.held: list[Region] = []
        self.kept: list[Region] = []
        self.waiting: list[tuple[asyncio.Task[Region], int, MemoryAccount]] = []

    def press(self) -> bool:
        if self.kept:
            self.kept.pop(0).release()
            return True
        return False

    def settle(self) -> None:
        """Runs the event loop and takes over the regions of completed allocations."""
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))
        for entry in [entry for entry in self.waiting if entry[0].done()]:
            self.waiting.remove(entry)
            if not entry[0].cancelled():
                self.held.append(entry[0].result())

    @rule(pages=st.integers(1, PAGES // 2), flow=st.integers(0, 2))
    def try_allocate(self, pages: int, flow: int) -> None:
        region = self.arena.try_allocate(pages * PAGE_BYTES, self.accounts[flow])
        if region is not None:
            assert all(account is not region.account for _, _, account in self.waiting)
            self.held.append(region)

    @rule(pages=st.integers(1, PAGES // 2), flow=st.integers(0, 2))
    def allocate(self, pages: int, flow: int) -> None:
        size, account = pages * PAGE_BYTES, self.accounts[flow]
        self.waiting.append((self.loop.create_task(self.arena.allocate(size, account)), size, account))
        self.settle()

    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        if self.held:
            region = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            if keep:
                self.kept.append(region)
                self.arena.wake()
            else:
                region.release()

    @rule(data=st.data(), late=st.booleans())
    def cancel(self, data: st.DataObject, late: bool) -> None:
        if self.waiting:
            if late and self.held:
                self.held.pop().release()
            self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))][0].cancel()
            self.settle()

    @rule()
    def turn(self) -> None:
        self.settle()

    @invariant()
    def accounts_balance(self) -> None:
        turned = [task.result() for task, _, _ in self.waiting if task.done() and not task.cancelled()]
        taken = [(region.offset, region.size_bytes) for region in (*self.held, *self.kept, *turned)]
        assert self.arena.used_bytes >= sum(size for _, size in taken)
        assert sum(account.held_bytes for account in self.accounts) == self.arena.used_bytes
        ends = [0, *(offset + size for offset, size in sorted(taken))]
        assert all(end <= offset for end, (offset, _) in zip(ends, sorted(taken), strict=False))

    @invariant()
    def pages_are_marked(self) -> None:
        for region in self.held + self.kept:
            place = {"offset": region.offset, "size_bytes": region.size_bytes}
            assert pages_are_of(self.arena.memory, generation=region.generation, **place)
        assert sum(mark != 0 for mark in self.arena._generations) * PAGE_BYTES == self.arena.used_bytes

    @invariant()
    def no_allocation_waits_for_free_memory(self) -> None:
        self.settle()
        passed: set[MemoryAccount] = set()
        for _, size, account in self.waiting:
            if account in passed:
                continue
            passed.add(account)
            assert not self.kept
            free_bytes = self.arena.size_bytes - self.arena.used_bytes
            if not (account.held_bytes and account.held_bytes + size > free_bytes):
                assert size > self.arena.largest_free_bytes
                break

    def teardown(self) -> None:
        for _ in range(1000):
            self.settle()
            if not self.held and not self.waiting:
                break
            while self.held:
                self.held.pop().release()
        assert not self.waiting
        while self.press():
            pass
        assert (self.arena.used_bytes, self.arena._regions) == (0, {})
        assert not any(self.arena._generations)
        self.arena.close()
        self.loop.close()


TestArenaModel = ArenaModel.TestCase


async def test_a_cancelled_waiter_blocks_no_later_one() -> None:
    arena = Arena(PAGES * PAGE_BYTES)
    large, small, cancelled = MemoryAccount(), MemoryAccount(), MemoryAccount()
    regions = [_region(arena, PAGES // 2 * PAGE_BYTES, large), _region(arena, PAGE_BYTES, small)]
    blocked = asyncio.create_task(arena.allocate(PAGES // 2 * PAGE_BYTES, cancelled))
    await asyncio.sleep(0)
    blocked.cancel()
    await asyncio.gather(blocked, return_exceptions=True)
    over_its_share = asyncio.create_task(arena.allocate(PAGES // 4 * PAGE_BYTES, large))
    await asyncio.sleep(0)
    assert not over_its_share.done()

    regions.append(_region(arena, PAGE_BYTES, small))

    for region in regions:
        region.release()
    (await over_its_share).release()
    arena.close()


TestArenaModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    "tensor",
    [
        np.arange(10_000, dtype=np.int32).reshape(100, 100)[::2, ::-3],
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.broadcast_to(np.float16(3), (5, 7)),
        np.array(2.5),
        np.zeros((3, 0, 2), np.float32),
        np.zeros(0, np.uint8),
    ],
    ids=["strided", "fortran", "broadcast", "0-d", "no elements", "empty"],
)
async def test_every_kind_of_tensor_is_written_once_and_unchanged(arena: Arena, tensor: Array) -> None:
    written = await arena.write({"n": np.ones(3, np.uint8), "x": tensor}, MemoryAccount())
    view = written.tensors["x"]
    np.testing.assert_array_equal(view, tensor)
    assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
    assert arena.copied_bytes == 3 + tensor.nbytes


async def test_large_tensors_are_written_unchanged_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_tensors, threads = memory.copy_tensors, list[str]()

    def observed(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return copy_tensors(*args, **kwargs)

    monkeypatch.setattr(memory, "copy_tensors", observed)
    arena = Arena(4 * COPY_IN_THREAD_BYTES)
    tensor = np.random.default_rng(0).integers(0, 255, COPY_IN_THREAD_BYTES, np.uint8)
    written = await arena.write({"x": tensor}, MemoryAccount())
    np.testing.assert_array_equal(written.tensors["x"], tensor)
    assert threads[0].startswith("bulk")


async def test_cancelled_copy_keeps_its_region_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(4 * COPY_IN_THREAD_BYTES)
    copy_tensors, started, gate = memory.copy_tensors, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        started.set()
        gate.wait(10)
        return copy_tensors(*args, **kwargs)

    monkeypatch.setattr(memory, "copy_tensors", slow)
    writing = asyncio.create_task(arena.write({"x": np.zeros(COPY_IN_THREAD_BYTES, np.uint8)}, MemoryAccount()))
    while not started.is_set():
        await asyncio.sleep(0.001)
    writing.cancel()
    await asyncio.wait([writing])
    assert arena.used_bytes > 0
    gate.set()
    await until(lambda: not arena.used_bytes, timeout_s=5)


async def test_objects_are_never_written(arena: Arena) -> None:
    with pytest.raises(InvalidChunkError, match="objects"):
        await arena.write({"x": np.array([object()])}, MemoryAccount())
    assert arena.used_bytes == 0


async def test_region_is_freed_by_its_last_holder(arena: Arena) -> None:
    account = MemoryAccount()
    region = _region(arena, 5000, account)
    region.retain()
    region.release()
    assert (account.held_bytes, arena.used_bytes) == (8192, 8192)
    region.release()
    assert (account.held_bytes, arena.used_bytes) == (0, 0)


async def test_tensor_in_the_arena_is_found(arena: Arena) -> None:
    written = await arena.write({"n": np.ones(3, np.uint8), "x": np.arange(9000.0)}, MemoryAccount())
    tensor = written.tensors["x"]
    frozen = tensor[512:600]
    frozen.flags.writeable = False
    assert arena.find(tensor) == (written.region, written.region.offset + 64)
    assert arena.find(tensor[8000:]) == (written.region, written.region.offset + 64 + 64_000)
    assert arena.find(frozen) == (written.region, written.region.offset + 64 + 4096)


async def test_tensor_outside_a_single_region_is_not_found(arena: Arena) -> None:
    tensor = (await arena.write({"x": np.arange(9000.0)}, MemoryAccount())).tensors["x"]
    over_the_end: Array = np.ndarray(100_000, np.uint8, arena.memory, arena.data_offset)
    table: Array = np.ndarray(8, np.uint8, arena.memory, PAGE_BYTES)
    other = np.arange(9000.0)
    for strange in (tensor[::2], tensor[:0], other, other[3:], over_the_end, table):
        assert arena.find(strange) is None


async def test_tensor_of_a_freed_region_is_not_found(arena: Arena) -> None:
    written = await arena.write({"x": np.arange(9000.0)}, MemoryAccount())
    written.region.release()
    assert arena.find(written.tensors["x"]) is None


async def test_chunk_beyond_half_of_the_arena_names_the_remedy(arena: Arena) -> None:
    with raises(InvalidChunkError, reason="CHUNK_TOO_LARGE", match="raise data_plane"):
        await arena.allocate(MIB // 2 + 1, MemoryAccount())
    _region(arena, arena.max_region_bytes)


async def test_flow_with_much_memory_leaves_space_for_others(arena: Arena) -> None:
    greedy, modest = MemoryAccount(), MemoryAccount()
    first = _region(arena, MIB // 2, greedy)
    _region(arena, PAGE_BYTES)
    waiting = asyncio.create_task(arena.allocate(PAGE_BYTES, greedy))
    await asyncio.sleep(0)
    assert not waiting.done()
    taken = _region(arena, MIB // 4, modest)
    first.release()
    await waiting
    assert greedy.held_bytes == PAGE_BYTES
    taken.release()


async def test_large_allocation_is_not_overtaken_forever(arena: Arena) -> None:
    held = [_region(arena, MIB // 4) for _ in range(4)]
    large = asyncio.create_task(arena.allocate(MIB // 2, MemoryAccount()))
    await asyncio.sleep(0)
    small = asyncio.create_task(arena.allocate(PAGE_BYTES, MemoryAccount()))
    held[0].release()
    assert arena.try_allocate(PAGE_BYTES, MemoryAccount()) is None
    await asyncio.sleep(0)
    assert not small.done()
    held[1].release()
    held[2].release()
    assert {(await large).size_bytes, (await small).size_bytes} == {MIB // 2, PAGE_BYTES}


async def test_allocations_of_one_flow_are_served_in_order(arena: Arena) -> None:
    account = MemoryAccount()
    held = _region(arena, MIB // 2, account)
    _region(arena, PAGE_BYTES)
    order: list[int] = []

    async def allocate_next(number: int, size_bytes: int) -> None:
        await arena.allocate(size_bytes, account)
        order.append(number)

    tasks = [asyncio.create_task(allocate_next(n, size)) for n, size in enumerate((MIB // 4, PAGE_BYTES, PAGE_BYTES))]
    await asyncio.sleep(0)
    assert arena.try_allocate(PAGE_BYTES, account) is None
    held.release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_retained_regions_are_freed_before_an_allocation_waits(arena: Arena) -> None:
    account = MemoryAccount()
    _region(arena, PAGE_BYTES)
    kept = [_region(arena, MIB // 4, account) for _ in range(2)]

    def press() -> bool:
        kept.pop().release()
        return True

    arena.on_pressure = press
    assert arena.try_allocate(MIB // 2, account) is not None
    assert not kept


async def test_cancelled_allocation_passes_its_turn_on(arena: Arena) -> None:
    held = [_region(arena, MIB // 2) for _ in range(2)]
    waiting = [asyncio.create_task(arena.allocate(MIB // 2, MemoryAccount())) for _ in range(3)]
    await asyncio.sleep(0)
    held[0].release()
    await asyncio.sleep(0)  # The first allocation is granted, but its task has not run yet.
    waiting[0].cancel()
    held[1].release()
    await asyncio.gather(*waiting[1:])
    assert arena.waiting == 0
    assert arena.used_bytes == MIB


async def test_array_holds_its_region_as_long_as_a_view_of_it_lives(arena: Arena) -> None:
    array = _region(arena, 3 * PAGE_BYTES).as_array()
    view = array[PAGE_BYTES:].view(np.float32).reshape(2, -1)[1]
    del array
    found = arena.find(view)
    assert found is not None
    found.region.retain()
    del view
    await asyncio.sleep(0)
    assert arena.used_bytes == 3 * PAGE_BYTES
    found.region.release()
    assert arena.used_bytes == 0


async def test_array_may_be_dropped_in_any_thread(arena: Arena) -> None:
    arrays = [_region(arena, PAGE_BYTES).as_array() for _ in range(200)]
    threads = [threading.Thread(target=lambda: [arrays.pop() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert arena.used_bytes == 0


async def test_dropped_array_frees_its_space_at_once(arena: Arena) -> None:
    arrays = [_region(arena, MIB // 2).as_array() for _ in range(2)]
    arrays.clear()
    assert arena.try_allocate(MIB // 2, MemoryAccount()) is not None


def test_array_may_outlive_loop_and_arena() -> None:
    async def make() -> Array:
        return _region(Arena(MIB), PAGE_BYTES).as_array()

    array = asyncio.run(make())
    gc.collect()
    array[:] = 1
    assert array.sum() == PAGE_BYTES


async def test_largest_free_run_is_reported(arena: Arena) -> None:
    regions = [_region(arena, MIB // 4) for _ in range(4)]
    regions[0].release()
    regions[2].release()
    assert (arena.used_bytes, arena.largest_free_bytes) == (MIB // 2, MIB // 4)


@pytest.mark.parametrize("count", [10**8 - 2, 2**32 - 2, 2**32 + 10**8])
async def test_generations_neither_wrap_nor_collide(arena: Arena, count: int) -> None:
    arena._generation = count
    regions = [_region(arena, PAGE_BYTES) for _ in range(4)]
    assert [region.generation for region in regions] == [count + 1, count + 2, count + 3, count + 4]
    for region in regions:
        assert arena.find(region.as_array()[:8]) == (region, region.offset)


async def test_closing_fails_waiting_allocations_and_leaves_views_valid() -> None:
    arena = Arena(MIB)
    written = await arena.write({"x": np.arange(100)}, MemoryAccount())
    _region(arena, MIB // 2)
    waiting = asyncio.create_task(arena.allocate(MIB // 2, MemoryAccount()))
    await asyncio.sleep(0)
    arena.close()
    arena.close()
    with pytest.raises(UnavailableError):
        await waiting
    assert written.tensors["x"].sum() == 4950


async def test_handed_out_descriptor_allows_neither_resizing_nor_writing(arena: Arena) -> None:
    fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    try:
        for size in (0, arena.file_bytes + PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
    assert arena.fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.file_bytes)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY, os.O_RDONLY])
def test_shared_file_cannot_be_opened_again_for_writing(arena: Arena, flags: int) -> None:
    own = arena.fd
    before = os.pread(own or 0, arena.file_bytes, 0)
    assert arena.share() == arena.share() == own
    fd = os.open(f"/proc/self/fd/{own}", flags)
    try:
        os.fchmod(fd, 0o777)
        for write in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: mmap.mmap(fd, PAGE_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
            lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
            lambda: os.posix_fallocate(fd, 0, arena.file_bytes + 1),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
        ):
            with pytest.raises(OSError, match=r"not permitted|denied|Bad file|Invalid"):
                write()
    finally:
        os.close(fd)
    assert os.pread(own or 0, arena.file_bytes, 0) == before
    arena.memory[-1] = 7
    assert os.pread(own or 0, 1, arena.file_bytes - 1) == b"\x07", "the replica itself writes on"


@pytest.mark.parametrize("pages", [1, 509, 510, 511, 512, 1021, 1022, 1023, 16384])
def test_reader_finds_the_data_of_a_file_of_any_size(pages: int) -> None:
    offset = memory.data_offset(pages * PAGE_BYTES)
    file_bytes = offset + pages * PAGE_BYTES
    assert memory.data_offset_in(file_bytes) == offset
    assert file_bytes // PAGE_BYTES * 8 <= offset - PAGE_BYTES


async def test_missing_memory_is_a_clear_error_at_the_start() -> None:
    with files_of_at_most(1 << 20), raises(NotReadyError, reason="NO_MEMORY", match="arena_bytes"):
        Arena(16 << 20)


def test_arena_larger_than_the_hosts_memory_is_rejected_before_allocation() -> None:
    with pytest.raises(NotReadyError, match="MiB are free"):
        Arena(1 << 46)


def test_layout_is_aligned_and_separates_the_tensors() -> None:
    layout = layout_of({"a": np.zeros(0), "b": np.zeros(65, np.uint8), "c": np.array(1.0)})
    assert layout.offsets == (0, 64, 192)
    assert layout.size_bytes == 256


@pytest.mark.gpu
async def test_pinned_arena_is_copied_to_a_device_without_waiting(arena: Arena) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pin_if_cuda(arena.memory)
    tensor = torch.from_numpy((await arena.write({"x": np.arange(1000.0)}, MemoryAccount())).tensors["x"])
    assert tensor.is_pinned()
    assert tensor.to("cuda", non_blocking=True).sum().item() == 499_500
