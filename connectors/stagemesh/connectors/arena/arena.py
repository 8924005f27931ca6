"""A replica's arena: preallocated shared memory that tensors are written into once and read from in place.

Room is shared fairly: a flow that holds some already waits while it would then hold more than is left free. Source:
A. Choudhury and E. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998 (alpha = 1).
"""

import asyncio
import ctypes
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
from stagemesh.connectors.arena.account import MemoryAccount
from stagemesh.connectors.arena.memory_file import (
    TOKEN_BYTES,
    Layout,
    copy_tensors,
    create_memory_file,
    data_offset,
    free_pages,
    layout_of,
    mark_pages,
    page_bytes_for,
)
from stagemesh.connectors.arena.page_allocator import PAGE_BYTES, PageAllocator
from stagemesh.connectors.arena.worker_writer import WRITER_SHIFT, Handle, PartitionTicket, read_handle
from stagemesh.connectors.base import Bytes

__all__ = ["Arena", "ArenaStats", "Found", "Layout", "MemoryAccount", "Region", "Written", "layout_of", "when_gone"]

COPY_IN_THREAD_BYTES = 4 << 20
"""From here on a copy is done in a thread: below, the 0.2 ms that this costs are more than the loop is held up for."""


class Region:
    """Whole pages of an arena, freed when their last holder lets go. Used on the event loop."""

    __slots__ = ("_arena", "_holders", "account", "generation", "offset", "size_bytes")

    def __init__(
        self, arena: "Arena", *, offset: int, size_bytes: int, generation: int, account: MemoryAccount
    ) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.generation = generation
        self.account = account
        self._arena = arena
        self._holders = 1

    def retain(self) -> None:
        """Adds a holder."""
        assert self._holders > 0, "a freed region cannot be held again"
        self._holders += 1

    def release(self) -> None:
        """Takes a holder away; the last one frees the pages."""
        assert self._holders > 0, "a region is released once per holder"
        self._holders -= 1
        if self._holders == 0:
            self._arena.free(self)

    def bytes(self, offset: int, size_bytes: int) -> Bytes:
        """A view of a range, `offset` counted from the region's start. Does not hold the region."""
        assert 0 <= offset <= offset + size_bytes <= self.size_bytes, "the range lies outside the region"
        return np.ndarray(size_bytes, np.uint8, self._arena.memory, self.offset + offset)

    def as_array(self) -> Bytes:
        """All bytes. The caller's hold goes over to the array, and ends when it and all views of it are gone."""
        array = self.bytes(0, self.size_bytes)
        when_gone(array, self._arena.returner(self))
        return array


class Written(NamedTuple):
    """Tensors in an arena. The region is held once, by whoever got this."""

    region: Region
    tensors: dict[str, Array]
    offsets: Sequence[int]
    """Of each tensor, from the file's start."""

    def held(self) -> dict[str, Array]:
        """The tensors as views that hold the region until the last of them is gone; the caller's hold goes over."""
        whole = self.region.as_array()
        return {name: _view_of(whole, tensor) for name, tensor in self.tensors.items()}


class Found(NamedTuple):
    """Where in an arena a tensor lies; the offset counts from the file's start."""

    region: Region
    offset: int


class ArenaStats(NamedTuple):
    """How an arena is used."""

    size_bytes: int
    used_bytes: int
    largest_free_bytes: int
    waiting: int
    regions: int
    copied_bytes: int
    """Copied in since the start."""

    @property
    def fragmentation(self) -> float:
        """The part of the free memory that is not in one piece, 0 to 1."""
        free_bytes = self.size_bytes - self.used_bytes
        return 1 - self.largest_free_bytes / free_bytes if free_bytes else 0.0


@dataclass
class _Share:
    """A slab set aside for a worker process, and how many regions that were adopted from it are held."""

    slab: Region
    regions: int = 0
    held_bytes: int = 0
    closed: bool = False


class _Wish(NamedTuple):
    size_bytes: int
    account: MemoryAccount


class Arena:
    """Owned by one replica and used from its event loop alone, but for `copy_in`."""

    def __init__(self, data_bytes: int) -> None:
        self._allocator = PageAllocator(data_bytes)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.data_offset = data_offset(data_bytes)
        self.file_bytes = self.data_offset + data_bytes
        self._fd, mapping = create_memory_file(data_bytes, self.token)
        self.memory = memoryview(mapping)
        """The whole file. It stays mapped as long as the arena or a view of it is referred to."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._generations = self.memory[PAGE_BYTES : self.data_offset].cast("Q")
        self._regions: dict[int, Region] = {}
        self._generation = 0
        self._shares: dict[int, _Share] = {}
        self._writers = 0
        self._shared_bytes = 0
        # In order of arrival.
        self._waiting: dict[asyncio.Future[Region], _Wish] = {}
        self._blocked = False
        """Whether one of those who wait lacks room, so that nobody may overtake it."""
        self._wake_due = False
        self._returned: deque[Region] = deque()
        self._collect_due = False
        self.copies = 0
        self.copied_bytes = 0
        self._counting = threading.Lock()
        self.on_pressure: Callable[[], bool] = lambda: False
        """Asked to free something that is kept only in case; says whether it did."""

    @property
    def fd(self) -> int:
        """The memory file, for a peer to map for reading; -1 once closed."""
        return self._fd

    @property
    def size_bytes(self) -> int:
        """Bytes for data in all."""
        return self._allocator.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in regions that are held; of a worker's slab, those in what was adopted from it."""
        adopted_bytes = sum(share.held_bytes for share in self._shares.values())
        return self._allocator.used_bytes - self._shared_bytes + adopted_bytes

    @property
    def max_region_bytes(self) -> int:
        """The largest region, half of what is not set aside for workers so that a second one can be under way."""
        return (self._allocator.size_bytes - self._shared_bytes) // 2

    def stats(self) -> ArenaStats:
        """A snapshot."""
        allocator = self._allocator
        return ArenaStats(
            size_bytes=allocator.size_bytes,
            used_bytes=self.used_bytes,
            largest_free_bytes=allocator.largest_free_bytes,
            waiting=len(self._waiting),
            regions=len(self._regions),
            copied_bytes=self.copied_bytes,
        )

    # -- room

    def try_allocate(self, size_bytes: int, account: MemoryAccount) -> Region | None:
        """A region of at least `size_bytes`, None where one has to wait. Raises InvalidChunkError for too much."""
        if size_bytes > self.max_region_bytes:
            raise InvalidChunkError(
                f"a chunk of {size_bytes} bytes exceeds the {self.max_region_bytes} that half of the arena holds; "
                "cut it with the edge's `chunk: {frames: N}` or raise data_plane.arena_bytes",
                reason="CHUNK_TOO_LARGE",
            )
        if self._returned:
            self._collect()
        if self._waiting:
            if self._wake_due:
                self._admit()
            if self._blocked or account.waiting:
                return None
        return self._take(page_bytes_for(size_bytes), account)

    async def allocate(self, size_bytes: int, account: MemoryAccount) -> Region:
        """A region of at least `size_bytes`, waiting in line for it. Raises InvalidChunkError for too much."""
        region = self.try_allocate(size_bytes, account)
        if region is not None:
            return region
        if self._fd < 0:
            raise _closed()
        wish = _Wish(page_bytes_for(size_bytes), account)
        turn: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        if not account.waiting and not self._over_share(wish):
            self._blocked = True
        self._waiting[turn] = wish
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
        """Lets those who wait look again, soon: something was freed, or `on_pressure` now can."""
        if self._waiting and not self._wake_due:
            self._wake_due = True
            next(iter(self._waiting)).get_loop().call_soon(self._admit)

    def free(self, region: Region) -> None:
        """Called by the region itself when its last holder lets go."""
        del self._regions[region.generation]
        writer = region.generation >> WRITER_SHIFT
        if writer:
            free_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes)
            share = self._shares[writer]
            share.regions, share.held_bytes = share.regions - 1, share.held_bytes - region.size_bytes
            self._drop_if_over(writer)
            return
        mark_pages(self.memory, offset=region.offset, size_bytes=region.size_bytes, generation=0)
        self._allocator.release(region.offset - self.data_offset)
        region.account.held_bytes -= region.size_bytes
        self.wake()

    # -- tensors

    def try_write(self, tensors: Tensors, account: MemoryAccount, layout: Layout | None = None) -> Written | None:
        """Copies tensors in at once, None where they have to wait; `layout` is theirs, where it is known.

        Raises InvalidChunkError for too much.
        """
        layout = layout or layout_of(tensors)
        region = self.try_allocate(layout.size_bytes, account)
        return None if region is None else self._copy_now(region, layout, tensors)

    async def write(self, tensors: Tensors, account: MemoryAccount, layout: Layout | None = None) -> Written:
        """Copies tensors in, waiting in line for room; otherwise as `try_write`."""
        layout = layout or layout_of(tensors)
        region = await self.allocate(layout.size_bytes, account)
        if layout.size_bytes < COPY_IN_THREAD_BYTES:
            return self._copy_now(region, layout, tensors)
        copying = asyncio.get_running_loop().run_in_executor(None, self.copy_in, region, layout, tensors)
        try:
            return Written(region, await asyncio.shield(copying), _offsets(region, layout.offsets))
        except BaseException:
            # A thread cannot be stopped: the region is given back once it no longer writes.
            copying.add_done_callback(lambda _: region.release())
            raise

    def copy_in(self, region: Region, layout: Layout, tensors: Tensors) -> dict[str, Array]:
        """Copies tensors into a region, in whatever thread; returns views of the copies."""
        assert layout.size_bytes <= region.size_bytes, "the tensors do not fit the region"
        views = copy_tensors(self.memory, start=region.offset, layout=layout, tensors=tensors)
        with self._counting:
            self.copies += len(views)
            self.copied_bytes += layout.tensor_bytes
        return views

    def find(self, tensor: Array) -> Found | None:
        """The region that a C-contiguous tensor lies in; None where it lies elsewhere or has no bytes."""
        size_bytes = tensor.nbytes
        if tensor.base is None or not size_bytes or not tensor.flags.c_contiguous:
            return None
        offset = _address_of(tensor) - self.address
        if not self.data_offset <= offset < self.file_bytes:
            return None
        region = self._regions.get(self._generations[offset // PAGE_BYTES])
        if region is None or offset + size_bytes > region.offset + region.size_bytes:
            return None
        return Found(region, offset)

    # -- worker processes

    def open_share(self, size_bytes: int) -> PartitionTicket:
        """Sets a slab aside for one worker process that writes by itself; each process needs one of its own.

        Raises NotReadyError (NO_MEMORY) where it does not fit.
        """
        fits = self._writers < (1 << 16) - 1 and size_bytes <= self.max_region_bytes
        slab = self.try_allocate(size_bytes, MemoryAccount()) if fits else None
        if slab is None:
            raise NotReadyError(
                f"the arena has no room for a worker's slab of {size_bytes} bytes; raise data_plane.arena_bytes",
                reason="NO_MEMORY",
            )
        mark_pages(self.memory, offset=slab.offset, size_bytes=slab.size_bytes, generation=0)
        self._writers += 1
        self._shares[self._writers] = _Share(slab)
        self._shared_bytes += slab.size_bytes
        return PartitionTicket(
            process_id=os.getpid(),
            file_descriptor=self._fd,
            token=self.token,
            writer=self._writers,
            offset=slab.offset,
            size_bytes=slab.size_bytes,
        )

    def adopt(self, handle: Handle) -> Written:
        """What a worker wrote; its pages go back to the worker with the region's last holder.

        Raises InvalidChunkError for a handle that is none of an open share, or was adopted before.
        """
        share = self._shares.get(handle.generation >> WRITER_SHIFT)
        if share is None or share.closed or handle.generation in self._regions:
            raise InvalidChunkError("a worker's handle belongs to no open share, or was adopted before")
        slab = share.slab
        views = read_handle(handle, self.memory, slab_offset=slab.offset, slab_bytes=slab.size_bytes)
        region = Region(
            self,
            offset=handle.offset,
            size_bytes=handle.size_bytes,
            generation=handle.generation,
            account=slab.account,
        )
        self._regions[handle.generation] = region
        share.regions, share.held_bytes = share.regions + 1, share.held_bytes + handle.size_bytes
        return Written(region, views, _offsets(region, [placed.offset for placed in handle.tensors]))

    def share_of(self, region: Region) -> tuple[int, int]:
        """Whose share a region lies in, 0 for nobody's, and how many bytes that has."""
        writer = region.generation >> WRITER_SHIFT
        return writer, self._shares[writer].slab.size_bytes if writer else self.size_bytes

    def close_share(self, ticket: PartitionTicket) -> None:
        """Takes a slab back once nothing adopted from it is held; for when its worker has ended. Twice is harmless."""
        share = self._shares.get(ticket.writer)
        if share is not None:
            share.closed = True
            self._drop_if_over(ticket.writer)

    # -- life

    def close(self) -> None:
        """Closes the memory file and ends those who wait; what is mapped stays so. Closing twice is harmless."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        for turn in list(self._waiting):
            self._leave(turn)
            if not turn.done():
                turn.set_exception(_closed())

    def returner(self, region: Region) -> Callable[[], None]:
        """What releases `region` on the event loop when called in whatever thread, at whatever moment."""
        loop, thread, returned = asyncio.get_running_loop(), threading.get_ident(), self._returned

        def give_back() -> None:
            returned.append(region)
            if not self._collect_due and not loop.is_closed():
                self._collect_due = True
                # The loop's own thread need not wake it up.
                (loop.call_soon if threading.get_ident() == thread else loop.call_soon_threadsafe)(self._collect)

        return give_back

    # -- inner workings

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
        account.held_bytes += size_bytes
        region = Region(self, offset=offset, size_bytes=size_bytes, generation=generation, account=account)
        self._regions[generation] = region
        return region

    def _over_share(self, wish: _Wish) -> bool:
        # By the plain rule even when alone: a flow that holds something never makes others wait behind it.
        held_bytes = wish.account.held_bytes
        return held_bytes > 0 and held_bytes + wish.size_bytes > self._allocator.free_bytes

    def _is_alone(self, account: MemoryAccount) -> bool:
        """Whether the account holds nothing, or nobody else holds anything: it then need not leave room for others."""
        held_bytes = account.held_bytes
        return not held_bytes or held_bytes + self._shared_bytes == self._allocator.used_bytes

    def _admit(self) -> None:
        """Serves those who wait, in order, up to the first that lacks room; accounts over their share are passed by."""
        self._wake_due = self._blocked = False
        held_back: set[MemoryAccount] = set()
        for turn, wish in list(self._waiting.items()):
            if turn.done() or wish.account in held_back:
                continue
            region = self._take(wish.size_bytes, wish.account)
            if region is not None:
                self._leave(turn)
                turn.set_result(region)
            elif self._over_share(wish):
                held_back.add(wish.account)
            else:
                self._blocked = True
                return

    def _leave(self, turn: asyncio.Future[Region]) -> None:
        wish = self._waiting.pop(turn, None)
        if wish is not None:
            wish.account.waiting -= 1
        if not self._waiting:
            self._blocked = False

    def _collect(self) -> None:
        self._collect_due = False
        while self._returned:
            self._returned.popleft().release()

    def _copy_now(self, region: Region, layout: Layout, tensors: Tensors) -> Written:
        try:
            return Written(region, self.copy_in(region, layout, tensors), _offsets(region, layout.offsets))
        except BaseException:
            region.release()
            raise

    def _drop_if_over(self, writer: int) -> None:
        share = self._shares[writer]
        if share.closed and not share.regions:
            del self._shares[writer]
            self._shared_bytes -= share.slab.size_bytes
            share.slab.release()


def when_gone(array: Array, call: Callable[[], None]) -> None:
    """Calls `call` when `array` and all views of it are gone: in whatever thread, in the midst of whatever it does."""

    def gone(reference: "weakref.ref[Array]") -> None:
        del _watched[id(reference)]
        call()

    # Further views refer to the array over the memory, not to one that was made of it.
    owner = array.base if isinstance(array.base, np.ndarray) else array
    reference = weakref.ref(owner, gone)
    _watched[id(reference)] = reference


_watched: dict[int, "weakref.ref[Array]"] = {}
"""As `weakref.finalize` keeps them, at half of its cost."""


def _offsets(region: Region, offsets: Sequence[int]) -> list[int]:
    start = region.offset
    return [start + offset for offset in offsets]


def _view_of(whole: Bytes, tensor: Array) -> Array:
    """A tensor that lies in `whole`, as a view of it."""
    if not tensor.nbytes:
        return tensor
    offset = _address_of(tensor) - _address_of(whole)
    return whole[offset : offset + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)


def _address_of(tensor: Array) -> int:
    try:
        # Four times as fast as `tensor.ctypes.data`.
        return ctypes.addressof(ctypes.c_char.from_buffer(tensor.data))
    except (TypeError, ValueError):
        return tensor.ctypes.data


def _closed() -> UnavailableError:
    return UnavailableError("the arena is closed: this replica is stopping", reason="CLOSED")
