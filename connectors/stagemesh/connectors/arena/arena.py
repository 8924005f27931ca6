"""A replica's arena: preallocated memory into which tensors are written once, and from which they are read in place.

`fair_share` decides which flow gets memory if not enough is free for all flows that need some.
"""

import asyncio
import ctypes
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from stagemesh.common.errors import InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.common.process.host import bulk_threads
from stagemesh.common.wire.tensors import Array, Tensors
from stagemesh.connectors.arena import memory
from stagemesh.connectors.arena.fair_share import FairShare
from stagemesh.connectors.arena.memory import PAGE_BYTES, PageAllocator
from stagemesh.connectors.arena.worker_writer import WRITER_SHIFT, Handle, PartitionAddress, read_handle
from stagemesh.connectors.base import ArenaRange, Bytes, MemoryAccount

COPY_IN_THREAD_BYTES = 4 << 20
"""The minimum size, in bytes, of a copy into the arena that runs in a thread instead of on the event loop.

A smaller copy blocks the event loop for less than half a millisecond. Running a copy in a thread costs a fifth of a
millisecond.
"""


@dataclass(eq=False, slots=True)
class Region:
    """A reference-counted run of whole pages of an arena. The pages are freed when the last reference is released.

    Regions are not thread-safe: use them only on the arena's event loop.
    """

    _arena: "Arena"
    offset: int
    size_bytes: int
    generation: int
    account: MemoryAccount
    _holders: int = 1

    def retain(self) -> None:
        """Adds a reference to the region. The region must not have been freed."""
        assert self._holders > 0, "a freed region cannot be retained"
        self._holders += 1

    def release(self) -> None:
        """Releases one reference to the region. Frees the region's pages if this was the last reference."""
        assert self._holders > 0, "release a region once for each holder"
        self._holders -= 1
        if self._holders == 0:
            self._arena.free(self)

    def as_array(self) -> Bytes:
        """Returns a uint8 view of the region's bytes. The view takes over the caller's reference to the region.

        The reference is released when this view and all views derived from it have been deleted.
        """
        array: Bytes = np.ndarray(self.size_bytes, np.uint8, self._arena.memory, self.offset)
        self.release_after((array,))
        return array

    def release_after(self, views: Sequence[Array]) -> None:
        """Releases one reference to the region when all `views`, and all views derived from them, have been deleted."""
        memory.when_gone(views, self._arena.releaser(self))


class Written(NamedTuple):
    """Tensors that were written into a region of an arena. The recipient owns one reference to the region.

    The recipient must either release this reference or call `held`.
    """

    region: Region
    tensors: dict[str, Array]
    """Views of the written tensors, by tensor name. The views do not retain the region."""
    places: Sequence[ArenaRange]
    """The arena range of each tensor, in the order of `tensors`."""

    def held(self) -> dict[str, Array]:
        """Returns the tensors by name. The tensors take over the recipient's reference to the region.

        The reference is released when these tensors and all views of them have been deleted.
        """
        self.region.release_after(list(self.tensors.values()))
        return self.tensors


class TensorLocation(NamedTuple):
    """The location of a tensor in an arena."""

    region: Region
    offset: int
    """The tensor's offset in bytes from the start of the arena's memory file."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Partition(MemoryAccount):
    """A part of the arena that is reserved for one worker process.

    Counts the bytes of the regions adopted from the worker.
    """

    region: Region
    closed: bool = False


class Arena:
    """Preallocated memory for the tensors of one replica.

    A shared arena is a memory file that other processes can map. An arena that is not shared is private memory, which
    uses huge pages if the kernel supports them. Arenas are not thread-safe: use them only on the replica's event loop.
    """

    def __init__(self, data_bytes: int, *, shared: bool = True) -> None:
        """Allocates the arena's memory. `data_bytes` is the capacity for tensors in bytes.

        Raises NotReadyError (NO_MEMORY) if not enough memory is available.
        """
        self._allocator = PageAllocator(data_bytes)
        self.token = secrets.token_bytes(memory.TOKEN_BYTES)
        self.data_offset = memory.data_offset(data_bytes)
        self.file_bytes = self.data_offset + data_bytes
        self.size_bytes = data_bytes
        """The arena's capacity for tensors in bytes, including the bytes in use."""
        self.fd, mapping = memory.create_memory(data_bytes, self.token, shared=shared)
        """The read-only file descriptor of the memory file, or None if the arena is private or closed.

        `share` returns it for other processes.
        """
        self._is_closed = self._is_sealed = False
        self.memory = memoryview(mapping)
        """The arena's whole memory, including the page table.

        The memory remains mapped as long as any view of it exists.
        """
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._generations = self.memory[PAGE_BYTES : self.data_offset].cast("Q")
        self._regions: dict[int, Region] = {}
        self._generation = 0
        self._partitions: dict[int, _Partition] = {}
        self._writers = 0
        self._partition_bytes = 0
        self._queue = FairShare(self._allocator, self._take)
        self._to_release: deque[Region] = deque()
        self._release_due = False
        self.copied_bytes = 0
        """The number of bytes copied into the arena since its creation."""
        self.on_pressure: Callable[[], bool] = lambda: False
        """A callback for an allocation that does not fit into the free memory. Returns True if it has freed any memory.

        It frees some of the memory that is retained only for recovery.
        """

    @property
    def used_bytes(self) -> int:
        """The number of bytes in allocated regions. In a worker's partition, only the adopted regions count."""
        adopted_bytes = sum(partition.held_bytes for partition in self._partitions.values())
        return self._allocator.used_bytes - self._partition_bytes + adopted_bytes

    @property
    def max_region_bytes(self) -> int:
        """The maximum size of a region in bytes: half of the memory outside partitions, so that two regions fit."""
        return (self.size_bytes - self._partition_bytes) // 2

    @property
    def largest_free_bytes(self) -> int:
        """The size in bytes of the longest run of free pages."""
        return self._allocator.largest_free_bytes

    @property
    def waiting(self) -> int:
        """The number of allocations that wait for free memory."""
        return self._queue.waiting

    # -- allocation

    def try_allocate(self, size_bytes: int, account: MemoryAccount) -> Region | None:
        """Returns a new region of at least `size_bytes` bytes, or None if `allocate` would have to wait.

        The region's bytes count toward `account`. Raises InvalidChunkError if `size_bytes` exceeds `max_region_bytes`.
        """
        if size_bytes > self.max_region_bytes:
            raise InvalidChunkError(
                f"a chunk of {size_bytes} bytes exceeds half of the arena, which has {self.max_region_bytes} bytes; "
                "cut it with the edge's `chunk: {frames: N}` or raise data_plane.arena_bytes",
                reason="CHUNK_TOO_LARGE",
            )
        if self._to_release:
            self._release_deleted()
        if self._queue.waiting and self._queue.must_wait(account):
            return None
        return self._take(memory.page_bytes_for(size_bytes), account)

    async def allocate(self, size_bytes: int, account: MemoryAccount) -> Region:
        """Returns a new region of at least `size_bytes` bytes. Waits until enough memory is free.

        Waiting allocations are served in order of arrival. The region's bytes count toward `account`. Raises
        InvalidChunkError if `size_bytes` exceeds `max_region_bytes`, and UnavailableError if the arena is closed.
        """
        region = self.try_allocate(size_bytes, account)
        if region is not None:
            return region
        if self._is_closed:
            raise _closed()
        return await self._queue.wait(memory.page_bytes_for(size_bytes), account)

    def wake(self) -> None:
        """Schedules a retry of the waiting allocations.

        Call it after memory was freed, or when `on_pressure` has become able to free memory.
        """
        self._queue.wake()

    def free(self, region: Region) -> None:
        """Frees the region's pages. Called when the last reference to the region is released."""
        del self._regions[region.generation]
        region.account.held_bytes -= region.size_bytes
        writer = region.generation >> WRITER_SHIFT
        if writer:
            memory.free_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes)
            self._remove_if_unused(writer)
            return
        memory.mark_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes, generation=0)
        self._allocator.release(region.offset - self.data_offset)
        self.wake()

    # -- tensors

    async def write(self, tensors: Tensors, account: MemoryAccount, layout: memory.Layout | None = None) -> Written:
        """Copies tensors into a new region. Waits until enough memory is free.

        `layout` is the tensors' precomputed layout. If it is None, the layout is computed. The region's bytes count
        toward `account`. Raises InvalidChunkError if the tensors are larger than `max_region_bytes`, and
        UnavailableError if the arena is closed.
        """
        layout = layout or memory.layout_of(tensors)
        region = self.try_allocate(layout.size_bytes, account) or await self.allocate(layout.size_bytes, account)
        copy = partial(memory.copy_tensors, self.memory, start=region.offset, layout=layout, tensors=tensors)
        if layout.size_bytes < COPY_IN_THREAD_BYTES:
            try:
                views = copy()
            except BaseException:
                region.release()
                raise
        else:
            copying = asyncio.get_running_loop().run_in_executor(bulk_threads(), copy)
            try:
                views = await asyncio.shield(copying)
            except BaseException:
                # The thread cannot be stopped, so the region is released when the thread has finished writing.
                copying.add_done_callback(lambda _: region.release())
                raise
        self.copied_bytes += layout.tensor_bytes
        return _written(region, views, layout.offsets)

    def find(self, tensor: Array) -> TensorLocation | None:
        """Returns the tensor's location in the arena, or None if the tensor is not in the arena.

        Also returns None if the tensor is empty or is not C-contiguous.
        """
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

    def open_partition(self, size_bytes: int) -> PartitionAddress:
        """Reserves a partition, in which one worker process can allocate memory by itself.

        `size_bytes` is the minimum size of the partition. Returns the address at which the worker opens the partition.
        The worker must open the partition before `share` is called. Raises NotReadyError: ARENA_NOT_SHARED if the arena
        is private, NO_MEMORY if there is not enough free memory for the partition.
        """
        if self.fd is None:
            raise NotReadyError(
                "the engine's worker cannot write into a private arena; remove data_plane.shared_arena",
                reason="ARENA_NOT_SHARED",
            )
        fits = self._writers < (1 << 16) - 1 and size_bytes <= self.max_region_bytes
        region = self.try_allocate(size_bytes, MemoryAccount()) if fits else None
        if region is None:
            raise NotReadyError(
                f"the arena has no space for a worker's partition of {size_bytes} bytes; raise data_plane.arena_bytes",
                reason="NO_MEMORY",
            )
        memory.mark_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes, generation=0)
        self._writers += 1
        self._partitions[self._writers] = _Partition(region=region)
        self._partition_bytes += region.size_bytes
        return PartitionAddress(
            process_id=os.getpid(),
            file_descriptor=self.fd,
            token=self.token,
            writer=self._writers,
            offset=region.offset,
            size_bytes=region.size_bytes,
        )

    def adopt(self, handle: Handle) -> Written:
        """Returns the tensors that a worker process wrote into its partition, without copying them.

        The worker can reuse the pages after the returned region is freed. Raises InvalidChunkError if the handle is
        invalid, belongs to no open partition or was adopted before.
        """
        partition = self._partitions.get(handle.generation >> WRITER_SHIFT)
        if partition is None or partition.closed or handle.generation in self._regions:
            raise InvalidChunkError("a worker's handle belongs to no open partition, or was adopted before")
        whole = partition.region
        views = read_handle(handle, self.memory, offset=whole.offset, size_bytes=whole.size_bytes)
        region = self._region(handle.offset, handle.size_bytes, handle.generation, partition)
        return _written(region, views, [placed.offset for placed in handle.tensors])

    def partition_of(self, region: Region) -> tuple[int, int]:
        """Returns the number of the partition that contains `region`, and the partition's size in bytes.

        Returns 0 and the size of the arena in bytes if the region is outside all partitions.
        """
        writer = region.generation >> WRITER_SHIFT
        return writer, self._partitions[writer].region.size_bytes if writer else self.size_bytes

    def close_partition(self, address: PartitionAddress) -> None:
        """Closes the partition at `address`. Idempotent. Call it after the worker process has terminated.

        The partition's memory is freed when all regions that were adopted from the partition are freed.
        """
        partition = self._partitions.get(address.writer)
        if partition is not None:
            partition.closed = True
            self._remove_if_unused(address.writer)

    # -- lifecycle

    def share(self) -> int | None:
        """Returns the file descriptor for a process that may only read the arena, or None if the arena is private.

        The first call ends the time in which workers can open their partitions: it seals the file against new writers.
        """
        if self.fd is not None and not self._is_sealed:
            try:
                memory.seal_writes(self.fd)
            except OSError:
                # Some sandboxes, such as gVisor, do not have the seal.
                return None
            self._is_sealed = True
        return self.fd

    def close(self) -> None:
        """Closes the memory file, and fails the waiting allocations with UnavailableError. Idempotent.

        The memory remains mapped as long as any view of it exists.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self._queue.close(_closed())

    def releaser(self, region: Region) -> Callable[[], None]:
        """Returns a function that releases one reference to `region` on the event loop.

        Any thread may call the returned function.
        """
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
        memory.mark_pages(self.memory, offset=offset, size_bytes=size_bytes, generation=generation)
        return self._region(offset, size_bytes, generation, account)

    def _region(self, offset: int, size_bytes: int, generation: int, account: MemoryAccount) -> Region:
        account.held_bytes += size_bytes
        region = self._regions[generation] = Region(self, offset, size_bytes, generation, account)
        return region

    def _is_alone(self, account: MemoryAccount) -> bool:
        """Returns whether the fair share does not apply to `account`.

        That is the case if either this account or all other accounts use no memory.
        """
        held_bytes = account.held_bytes
        return not held_bytes or held_bytes + self._partition_bytes == self._allocator.used_bytes

    def _release_deleted(self) -> None:
        self._release_due = False
        while self._to_release:
            self._to_release.popleft().release()

    def _remove_if_unused(self, writer: int) -> None:
        partition = self._partitions[writer]
        if partition.closed and not partition.held_bytes:
            del self._partitions[writer]
            self._partition_bytes -= partition.region.size_bytes
            partition.region.release()


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
    return UnavailableError("the arena is closed: this replica is stopping", reason="SHUTTING_DOWN")
