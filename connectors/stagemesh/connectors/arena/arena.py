"""A replica's arena: preallocated memory into which tensors are written once, and from which they are read in place.

Flows share the memory fairly. If a flow that already uses memory would use more bytes than are free, its allocation
waits. Source: A. Choudhury and E. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998
(alpha = 1).
"""

import asyncio
import ctypes
import itertools
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagemesh.common.errors import InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.common.tensors import Array, Tensors
from stagemesh.connectors.arena.memory_file import (
    TOKEN_BYTES,
    Layout,
    copy_tensors,
    create_memory_file,
    create_private_memory,
    data_offset,
    free_pages,
    layout_of,
    mark_pages,
    page_bytes_for,
)
from stagemesh.connectors.arena.page_allocator import PAGE_BYTES, PageAllocator
from stagemesh.connectors.arena.worker_writer import WRITER_SHIFT, Handle, PartitionTicket, read_handle
from stagemesh.connectors.base import ArenaRange, Bytes, MemoryAccount

__all__ = ["Arena", "Layout", "MemoryAccount", "Region", "Written", "layout_of", "when_gone"]

COPY_IN_THREAD_BYTES = 4 << 20
"""The minimum size in bytes of a copy that runs in a thread if its allocation had to wait.

A smaller copy blocks the event loop for less than 0.2 ms, which is the cost of using a thread.
"""


@dataclass(eq=False, slots=True)
class Region:
    """A reference-counted run of whole pages of an arena. It is freed when its last reference is released.

    Use it only on the event loop.
    """

    _arena: "Arena"
    offset: int
    size_bytes: int
    generation: int
    account: MemoryAccount
    _holders: int = 1

    def retain(self) -> None:
        """Adds a reference to the region, which must not have been freed."""
        assert self._holders > 0, "a freed region cannot be retained"
        self._holders += 1

    def release(self) -> None:
        """Releases one reference to the region. Frees the pages if it was the last reference."""
        assert self._holders > 0, "release a region once for each holder"
        self._holders -= 1
        if self._holders == 0:
            self._arena.free(self)

    def bytes(self, offset: int, size_bytes: int) -> Bytes:
        """Returns a view that does not retain the region. `offset` is in bytes from the start of the region."""
        assert 0 <= offset <= offset + size_bytes <= self.size_bytes, "the range is outside the region"
        return np.ndarray(size_bytes, np.uint8, self._arena.memory, self.offset + offset)

    def as_array(self) -> Bytes:
        """Returns a view of all bytes, which takes over the caller's reference to the region.

        The reference is released when this view and all views of it are deleted.
        """
        array = self.bytes(0, self.size_bytes)
        self.release_after((array,))
        return array

    def release_after(self, views: Sequence[Array]) -> None:
        """Releases one reference when all `views`, and all views of them, are deleted."""
        when_gone(views, self._arena.releaser(self))


class Written(NamedTuple):
    """Tensors that were written into a region of an arena. Contains one reference to the region.

    The recipient must release this reference, or call `held`.
    """

    region: Region
    tensors: dict[str, Array]
    """Views of the written tensors. The views do not retain the region."""
    places: Sequence[ArenaRange]
    """The arena range of each tensor."""

    def held(self) -> dict[str, Array]:
        """Returns the tensors, which take over the caller's reference to the region.

        The reference is released when these tensors and all views of them are deleted.
        """
        self.region.release_after(list(self.tensors.values()))
        return self.tensors


class TensorLocation(NamedTuple):
    """The location of a tensor in an arena."""

    region: Region
    offset: int
    """The offset in bytes from the start of the memory file."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Partition(MemoryAccount):
    """A part of the arena that is reserved for one worker process, and the account of the adopted regions in it."""

    slab: Region
    closed: bool = False


class _Allocation(NamedTuple):
    """A request for memory that waits for space."""

    size_bytes: int
    account: MemoryAccount


class Arena:
    """Preallocated memory for the tensors of one replica.

    Only `copy_in` may be called outside the replica's event loop. A shared arena is a memory file that other processes
    can map. An arena that is not shared is private memory, for which the kernel uses huge pages if possible.
    """

    def __init__(self, data_bytes: int, *, shared: bool = True) -> None:
        """Creates the memory. Raises NotReadyError (NO_MEMORY) if not enough memory is available."""
        self._allocator = PageAllocator(data_bytes)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.data_offset = data_offset(data_bytes)
        self.file_bytes = self.data_offset + data_bytes
        create = create_memory_file if shared else create_private_memory
        self.size_bytes = data_bytes
        """The number of bytes that are available for tensors, whether free or in use."""
        self.fd, mapping = create(data_bytes, self.token)
        self._is_closed = False
        self.memory = memoryview(mapping)
        """The whole memory. It remains mapped while the arena or a view of the memory is referenced."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._generations = self.memory[PAGE_BYTES : self.data_offset].cast("Q")
        self._regions: dict[int, Region] = {}
        self._generation = 0
        self._partitions: dict[int, _Partition] = {}
        self._writers = 0
        self._partition_bytes = 0
        self._waiting: dict[asyncio.Future[Region], _Allocation] = {}
        """The waiting allocations in order of arrival."""
        self._blocked = False
        """Whether a waiting allocation lacks space, so that no later allocation may overtake it."""
        self._wake_due = False
        self._to_release: deque[Region] = deque()
        self._release_due = False
        self.copied_bytes = 0
        """The number of bytes copied into the arena since its creation."""
        self._counting = threading.Lock()
        self.on_pressure: Callable[[], bool] = lambda: False
        """A callback that frees some memory that is retained only for recovery. Called when an allocation lacks space.

        Returns True if it freed memory.
        """

    @property
    def used_bytes(self) -> int:
        """The number of bytes in allocated regions. In workers' partitions, only adopted regions count."""
        adopted_bytes = sum(partition.held_bytes for partition in self._partitions.values())
        return self._allocator.used_bytes - self._partition_bytes + adopted_bytes

    @property
    def max_region_bytes(self) -> int:
        """The maximum size of a region: half of the memory outside partitions, so that two such regions fit."""
        return (self.size_bytes - self._partition_bytes) // 2

    @property
    def largest_free_bytes(self) -> int:
        """The size in bytes of the largest free run."""
        return self._allocator.largest_free_bytes

    @property
    def waiting(self) -> int:
        """The number of allocations that wait for space."""
        return len(self._waiting)

    # -- allocation

    def try_allocate(self, size_bytes: int, account: MemoryAccount) -> Region | None:
        """Returns a region of at least `size_bytes`, or None if `allocate` would have to wait.

        Raises InvalidChunkError if `size_bytes` exceeds `max_region_bytes`.
        """
        if size_bytes > self.max_region_bytes:
            raise InvalidChunkError(
                f"a chunk of {size_bytes} bytes exceeds half of the arena, which has {self.max_region_bytes} bytes; "
                "cut it with the edge's `chunk: {frames: N}` or raise data_plane.arena_bytes",
                reason="CHUNK_TOO_LARGE",
            )
        if self._to_release:
            self._release_deleted()
        if self._waiting:
            if self._wake_due:
                self._admit()
            if self._blocked or account.waiting:
                return None
        return self._take(page_bytes_for(size_bytes), account)

    async def allocate(self, size_bytes: int, account: MemoryAccount) -> Region:
        """Returns a region of at least `size_bytes`. Waits in order of arrival if there is not enough space.

        Raises InvalidChunkError if `size_bytes` exceeds `max_region_bytes`, and UnavailableError if the arena is
        closed.
        """
        region = self.try_allocate(size_bytes, account)
        if region is not None:
            return region
        if self._is_closed:
            raise _closed()
        allocation = _Allocation(page_bytes_for(size_bytes), account)
        turn: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        if not account.waiting and not self._exceeds_fair_share(allocation):
            self._blocked = True
        self._waiting[turn] = allocation
        account.waiting += 1
        try:
            return await turn
        except asyncio.CancelledError:
            self._leave(turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().release()
            self.wake()
            raise

    def wake(self) -> None:
        """Schedules a retry of the waiting allocations.

        Call it when memory was freed or when `on_pressure` can free some.
        """
        if self._waiting and not self._wake_due:
            self._wake_due = True
            next(iter(self._waiting)).get_loop().call_soon(self._admit)

    def free(self, region: Region) -> None:
        """Frees the pages of a region. Called when the last reference to the region is released."""
        del self._regions[region.generation]
        region.account.held_bytes -= region.size_bytes
        writer = region.generation >> WRITER_SHIFT
        if writer:
            free_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes)
            self._remove_if_unused(writer)
            return
        mark_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes, generation=0)
        self._allocator.release(region.offset - self.data_offset)
        self.wake()

    # -- tensors

    async def write(self, tensors: Tensors, account: MemoryAccount, layout: Layout | None = None) -> Written:
        """Copies tensors into a new region. Waits in order of arrival if there is not enough space.

        `layout` is the tensors' layout, or None to compute it. Raises InvalidChunkError if the tensors can never fit,
        and UnavailableError if the arena is closed.
        """
        layout = layout or layout_of(tensors)
        region = self.try_allocate(layout.size_bytes, account)
        has_waited = region is None
        region = region or await self.allocate(layout.size_bytes, account)
        if not has_waited or layout.size_bytes < COPY_IN_THREAD_BYTES:
            return self._copy_now(region, layout, tensors)
        copying = asyncio.get_running_loop().run_in_executor(None, self.copy_in, region, layout, tensors)
        try:
            return _written(region, await asyncio.shield(copying), layout.offsets)
        except BaseException:
            # The thread cannot be stopped, so the region is released when the thread has finished writing.
            copying.add_done_callback(lambda _: region.release())
            raise

    def copy_in(self, region: Region, layout: Layout, tensors: Tensors) -> dict[str, Array]:
        """Copies tensors into a region and returns views of the copies by name. May be called in any thread."""
        assert layout.size_bytes <= region.size_bytes, "the tensors do not fit the region"
        views = copy_tensors(self.memory, start=region.offset, layout=layout, tensors=tensors)
        with self._counting:
            self.copied_bytes += layout.tensor_bytes
        return views

    def find(self, tensor: Array) -> TensorLocation | None:
        """Returns a tensor's location, or None if it is outside the arena, has no bytes or is not C-contiguous."""
        size_bytes = tensor.nbytes
        if tensor.base is None or not size_bytes or not tensor.flags.c_contiguous:
            return None
        offset = _address_of(tensor) - self.address
        if not self.data_offset <= offset < self.file_bytes:
            return None
        region = self._regions.get(self._generations[offset // PAGE_BYTES])
        if region is None or offset + size_bytes > region.offset + region.size_bytes:
            return None
        return TensorLocation(region, offset)

    # -- worker processes

    def open_partition(self, size_bytes: int) -> PartitionTicket:
        """Reserves a partition of at least `size_bytes`, in which one worker process allocates space by itself.

        Returns the ticket that the worker needs. Raises NotReadyError (NO_MEMORY) if there is no space for the
        partition.
        """
        assert self.fd >= 0, "only a shared arena has partitions"
        fits = self._writers < (1 << 16) - 1 and size_bytes <= self.max_region_bytes
        slab = self.try_allocate(size_bytes, MemoryAccount()) if fits else None
        if slab is None:
            raise NotReadyError(
                f"the arena has no space for a worker's slab of {size_bytes} bytes; raise data_plane.arena_bytes",
                reason="NO_MEMORY",
            )
        mark_pages(self.memory, offset=slab.offset, size_bytes=slab.size_bytes, generation=0)
        self._writers += 1
        self._partitions[self._writers] = _Partition(slab=slab)
        self._partition_bytes += slab.size_bytes
        return PartitionTicket(
            process_id=os.getpid(),
            file_descriptor=self.fd,
            token=self.token,
            writer=self._writers,
            offset=slab.offset,
            size_bytes=slab.size_bytes,
        )

    def adopt(self, handle: Handle) -> Written:
        """Returns the tensors that a worker process wrote, without copying them.

        When their region is freed, the worker can reuse the pages. Raises InvalidChunkError if the handle is
        invalid, belongs to no open partition or was adopted before.
        """
        partition = self._partitions.get(handle.generation >> WRITER_SHIFT)
        if partition is None or partition.closed or handle.generation in self._regions:
            raise InvalidChunkError("a worker's handle belongs to no open partition, or was adopted before")
        slab = partition.slab
        views = read_handle(handle, self.memory, slab_offset=slab.offset, slab_bytes=slab.size_bytes)
        region = self._region(handle.offset, handle.size_bytes, handle.generation, partition)
        return _written(region, views, [placed.offset for placed in handle.tensors])

    def partition_of(self, region: Region) -> tuple[int, int]:
        """Returns the number and the size in bytes of the partition that contains a region.

        Returns 0 and the size of the arena if the region is outside all partitions.
        """
        writer = region.generation >> WRITER_SHIFT
        return writer, self._partitions[writer].slab.size_bytes if writer else self.size_bytes

    def close_partition(self, ticket: PartitionTicket) -> None:
        """Frees a partition as soon as all regions that were adopted from it are freed. Idempotent.

        Call it after the worker process has terminated.
        """
        partition = self._partitions.get(ticket.writer)
        if partition is not None:
            partition.closed = True
            self._remove_if_unused(ticket.writer)

    # -- lifecycle

    def close(self) -> None:
        """Closes the memory file and fails all waiting allocations. Does not unmap the memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        for turn in list(self._waiting):
            self._leave(turn)
            if not turn.done():
                turn.set_exception(_closed())

    def releaser(self, region: Region) -> Callable[[], None]:
        """Returns a function that releases `region` on the event loop. Any thread may call the function."""
        loop, thread, to_release = asyncio.get_running_loop(), threading.get_ident(), self._to_release

        def release() -> None:
            to_release.append(region)
            if not self._release_due and not loop.is_closed():
                self._release_due = True
                # Only another thread must wake the event loop.
                schedule = loop.call_soon if threading.get_ident() == thread else loop.call_soon_threadsafe
                schedule(self._release_deleted)

        return release

    # -- internals

    def _take(self, size_bytes: int, account: MemoryAccount) -> Region | None:
        allocator = self._allocator
        while True:
            held_bytes = account.held_bytes
            if held_bytes + size_bytes <= allocator.free_bytes or self._is_alone(account):
                offset = allocator.allocate(size_bytes)
                if offset is not None:
                    break
            if not self.on_pressure():
                return None
        self._generation = generation = self._generation + 1
        offset += self.data_offset
        mark_pages(self.memory, offset=offset, size_bytes=size_bytes, generation=generation)
        return self._region(offset, size_bytes, generation, account)

    def _region(self, offset: int, size_bytes: int, generation: int, account: MemoryAccount) -> Region:
        account.held_bytes += size_bytes
        region = self._regions[generation] = Region(self, offset, size_bytes, generation, account)
        return region

    def _exceeds_fair_share(self, allocation: _Allocation) -> bool:
        # Also applies to the only account in use, so that a flow that uses memory never makes other flows wait behind
        # its own allocation.
        held_bytes = allocation.account.held_bytes
        return held_bytes > 0 and held_bytes + allocation.size_bytes > self._allocator.free_bytes

    def _is_alone(self, account: MemoryAccount) -> bool:
        """Returns whether the fair share does not apply, because this account or all other accounts use no memory."""
        held_bytes = account.held_bytes
        return not held_bytes or held_bytes + self._partition_bytes == self._allocator.used_bytes

    def _admit(self) -> None:
        """Serves the waiting allocations in order of arrival. Stops at the first allocation that lacks space.

        Skips the allocations of accounts that exceed their fair share.
        """
        self._wake_due = self._blocked = False
        skipped: set[MemoryAccount] = set()
        for turn, allocation in list(self._waiting.items()):
            if turn.done() or allocation.account in skipped:
                continue
            region = self._take(allocation.size_bytes, allocation.account)
            if region is not None:
                self._leave(turn)
                turn.set_result(region)
            elif self._exceeds_fair_share(allocation):
                skipped.add(allocation.account)
            else:
                self._blocked = True
                return

    def _leave(self, turn: asyncio.Future[Region]) -> None:
        allocation = self._waiting.pop(turn, None)
        if allocation is not None:
            allocation.account.waiting -= 1
        if not self._waiting:
            self._blocked = False

    def _release_deleted(self) -> None:
        self._release_due = False
        while self._to_release:
            self._to_release.popleft().release()

    def _copy_now(self, region: Region, layout: Layout, tensors: Tensors) -> Written:
        try:
            return _written(region, self.copy_in(region, layout, tensors), layout.offsets)
        except BaseException:
            region.release()
            raise

    def _remove_if_unused(self, writer: int) -> None:
        partition = self._partitions[writer]
        if partition.closed and not partition.held_bytes:
            del self._partitions[writer]
            self._partition_bytes -= partition.slab.size_bytes
            partition.slab.release()


def when_gone(arrays: Sequence[Array], call: Callable[[], None]) -> None:
    """Calls `call` once, when all `arrays` and all views of them are deleted. `arrays` must not be empty.

    `call` runs in the thread that deletes the last view, and can interrupt any code of that thread.
    """
    assert arrays, "the deletion of nothing is never noticed"
    total, gone_arrays = len(arrays), itertools.count(1)

    def gone(reference: "weakref.ref[Array]") -> None:
        del _watched[id(reference)]
        # `next` is atomic between threads, so exactly one call is the last one.
        if next(gone_arrays) == total:
            call()

    for array in arrays:
        # The base of a view is the array over the memory, not the view from which it was created.
        owner = array.base if isinstance(array.base, np.ndarray) else array
        reference = weakref.ref(owner, gone)
        _watched[id(reference)] = reference


_watched: dict[int, "weakref.ref[Array]"] = {}
"""The weak references that `when_gone` has created, by their ids. Each must live as long as its array.

`weakref.finalize` would have the same effect at twice the cost.
"""


def _written(region: Region, tensors: dict[str, Array], offsets: Sequence[int]) -> Written:
    start, generation = region.offset, region.generation
    places = [
        ArenaRange(start + offset, tensor.nbytes, generation)
        for tensor, offset in zip(tensors.values(), offsets, strict=True)
    ]
    return Written(region, tensors, places)


def _address_of(tensor: Array) -> int:
    try:
        # Four times as fast as `tensor.ctypes.data`.
        return ctypes.addressof(ctypes.c_char.from_buffer(tensor.data))
    except (TypeError, ValueError):
        return tensor.ctypes.data


def _closed() -> UnavailableError:
    return UnavailableError("the arena is closed: this replica is stopping", reason="CLOSED")
