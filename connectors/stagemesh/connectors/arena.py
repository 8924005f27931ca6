"""A replica's arena: preallocated shared memory that tensors are written into once and read from in place.

Layout of the memory file: one page with the token, then a table with the generation of every data page, then
the data, a power of two. A page's generation is the number of the allocation that holds it, 0 while it is
free, so that a reader can tell a region that was given away since from the one that it was promised.
The file is a sealed memfd: nobody can shrink it under a reader, and nothing is left when its holders are gone.
"""

import asyncio
import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from stagemesh.connectors.allocator import PAGE_BYTES, BuddyAllocator
from stagemesh.connectors.errors import InvalidChunkError, NotReadyError
from stagemesh.connectors.tensors import Array, Tensors
from stagemesh.v1 import stage_pb2

MEMFD_NAME = "stagemesh-arena"
TOKEN_BYTES = 16
ALIGNMENT_BYTES = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COPY_IN_THREAD_BYTES = 1 << 20


def data_offset(data_bytes: int) -> int:
    """Where the data of an arena for `data_bytes` begins."""
    table_bytes = data_bytes // PAGE_BYTES * 8
    return PAGE_BYTES + -(-table_bytes // PAGE_BYTES) * PAGE_BYTES


class Region:
    """A block of the arena with one tensor set in it, freed when its last holder lets go."""

    def __init__(
        self, arena: "Arena", *, offset: int, generation: int, layout: Mapping[str, tuple[int, Array]]
    ) -> None:
        self.offset = offset
        self.generation = generation
        self.tensor_offsets = {name: offset + relative for name, (relative, _) in layout.items()}
        self._arena = arena
        self._holders = 1

    def retain(self) -> None:
        """Adds a holder."""
        assert self._holders > 0, "a freed region cannot be held again"
        self._holders += 1

    def release(self) -> None:
        """Takes a holder away; the last one frees the block."""
        assert self._holders > 0, "a region is released once per holder"
        self._holders -= 1
        if self._holders == 0:
            self._arena.free(self)

    def view(self, name: str, size_bytes: int) -> memoryview:
        """The bytes of one tensor."""
        start = self.tensor_offsets[name]
        return self._arena.memory[start : start + size_bytes]


class Arena:
    """Owned by one replica and used from its event loop alone."""

    def __init__(self, data_bytes: int) -> None:
        self._allocator = BuddyAllocator(data_bytes)
        self._data_offset = data_offset(data_bytes)
        self._size_bytes = self._data_offset + data_bytes
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._fd = _create_memory_file(self._size_bytes)
        mapping = mmap.mmap(self._fd, self._size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        mapping[:TOKEN_BYTES] = self._token
        self.memory = memoryview(mapping)
        pages = data_bytes // PAGE_BYTES
        self._generations: npt.NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, count=pages, offset=PAGE_BYTES)
        self._allocations = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.on_pressure: Callable[[], bool] = lambda: False
        """Asked to free something that is kept only in case; says whether it did."""

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are held."""
        return self._allocator.used_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes for data in all."""
        return self._allocator.size_bytes

    @property
    def max_region_bytes(self) -> int:
        """The largest set of tensors that is taken, half of the arena so that a second one can be under way."""
        return self._allocator.size_bytes // 2

    def advertise(self) -> stage_pb2.ArenaAdvertisement:
        """What another process on this host needs to map the arena."""
        return stage_pb2.ArenaAdvertisement(
            process_id=os.getpid(), file_descriptor=self._fd, size_bytes=self._size_bytes, token=self._token
        )

    async def write(self, tensors: Tensors) -> Region:
        """Copies tensors in, waiting in line while the arena is full.

        Raises InvalidChunkError when they can never fit.
        """
        layout, total = _lay_out(tensors)
        if total > self.max_region_bytes:
            raise InvalidChunkError(
                f"a chunk of {total} bytes exceeds the {self.max_region_bytes} that half of the arena holds; "
                "cut it with the edge's `chunk: {frames: N}` or raise data_plane.arena_bytes",
                reason="CHUNK_TOO_LARGE",
            )
        region = await self._allocate(layout, total)
        try:
            if total >= _COPY_IN_THREAD_BYTES:
                await asyncio.to_thread(self._copy, region, layout)
            else:
                self._copy(region, layout)
        except BaseException:
            region.release()
            raise
        return region

    def free(self, region: Region) -> None:
        """Called by the region itself when its last holder lets go."""
        block = region.offset - self._data_offset
        self._mark(block, 0)
        self._allocator.release(block)
        self.wake()

    def wake(self) -> None:
        """Lets the first in line look again: something was freed, or can be."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def close(self) -> None:
        """Closes the memory file; readers keep their mappings. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _allocate(self, layout: Mapping[str, tuple[int, Array]], total: int) -> Region:
        waited = False
        while True:
            if waited or not self._waiters:
                block = self._try_allocate(total)
                if block is not None:
                    self._allocations += 1
                    self._mark(block, self._allocations)
                    self.wake()
                    return Region(self, offset=self._data_offset + block, generation=self._allocations, layout=layout)
            waiter = asyncio.get_running_loop().create_future()
            (self._waiters.appendleft if waited else self._waiters.append)(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # Our turn may have come with the cancel: pass it on.
                self.wake()
                raise
            waited = True

    def _try_allocate(self, total: int) -> int | None:
        block = self._allocator.allocate(total)
        while block is None and self.on_pressure():
            block = self._allocator.allocate(total)
        return block

    def _mark(self, block: int, generation: int) -> None:
        first = block // PAGE_BYTES
        self._generations[first : first + self._allocator.block_bytes(block) // PAGE_BYTES] = generation

    def _copy(self, region: Region, layout: Mapping[str, tuple[int, Array]]) -> None:
        for name, (_, tensor) in layout.items():
            if tensor.nbytes:
                target = np.frombuffer(region.view(name, tensor.nbytes), tensor.dtype).reshape(tensor.shape)
                np.copyto(target, tensor)


def _lay_out(tensors: Tensors) -> tuple[dict[str, tuple[int, Array]], int]:
    """Each tensor's offset within a region, aligned, and the region's size."""
    layout: dict[str, tuple[int, Array]] = {}
    total = 0
    for name, tensor in tensors.items():
        layout[name] = (total, tensor)
        total += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return layout, total


def _create_memory_file(size_bytes: int) -> int:
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as exc:
        os.close(fd)
        raise NotReadyError(
            f"no {size_bytes >> 20} MiB of shared memory for the arena ({exc.strerror}); "
            "give the host or container more memory, or lower data_plane.arena_bytes",
            reason="NO_MEMORY",
        ) from exc
    return fd
