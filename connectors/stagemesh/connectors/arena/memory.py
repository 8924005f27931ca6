"""The memory of an arena: the allocator of its pages, the memory file with its page table, and tensors in regions.

The first page contains a random token and the name of the memory layout. The next pages contain a table with one
generation for each page. The data pages follow the table. A page's generation is the number of the region to which
the page belongs. The generation is 0 if the page is free or contains no data. A reader compares generations to detect
that a region was freed after the region was offered.

A shared arena is a sealed memfd. No process can shrink the memfd while another process reads it. Before the memfd is
passed to a consumer, it is also sealed against new writers. The kernel frees the memfd when no process has it open or
mapped.

The allocator takes constant time. Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time
systems", ECRTS 2004 (two-level segregated fit). Free runs of pages are grouped into size classes by their number of
pages. Runs of fewer than 64 pages have one class for each number of pages. For longer runs, there are 32 classes
between each power of two and the next. A bit mask indicates which classes contain a free run, so that the smallest
sufficient class is found without a search.
"""

import fcntl
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.common.process.host import available_bytes
from stagemesh.common.wire.tensors import Array, Tensors

PAGE_BYTES = 4096

_STEP_BITS = 5
_EXACT_PAGES = 2 << _STEP_BITS


class PageAllocator:
    """An allocator of runs of pages, which merges adjacent free runs. Computes offsets without accessing the memory."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
            raise ValueError(f"size_bytes is {size_bytes}; it must be a multiple of {PAGE_BYTES} from {PAGE_BYTES}")
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        pages = size_bytes // PAGE_BYTES
        # The keys are the first pages of runs in order of release. The last run is reused first, because it is most
        # likely still in the processor's cache.
        self._classes: list[dict[int, None]] = [{} for _ in range(_size_class(pages) + 1)]
        self._nonempty = 0
        self._free_length: dict[int, int] = {}
        self._free_start: dict[int, int] = {}
        """Maps the page number after the end of each free run to the run's first page number."""
        self._taken: dict[int, int] = {}
        self._insert(0, pages)

    @property
    def used_bytes(self) -> int:
        """The number of bytes in allocated pages."""
        return self.size_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The size of the longest free run in bytes, or 0 if no page is free."""
        if not self._nonempty:
            return 0
        longest = self._classes[self._nonempty.bit_length() - 1]
        return max(self._free_length[start] for start in longest) * PAGE_BYTES

    def allocate(self, size_bytes: int) -> int | None:
        """Allocates a run of contiguous pages for `size_bytes` bytes. Allocates at least one page.

        Returns the run's offset in bytes, or None if no free run is long enough.
        """
        pages = (size_bytes + PAGE_BYTES - 1) // PAGE_BYTES or 1
        # Rounds up, because every run of the next class is long enough. A run of the size's class may be too short.
        size_class = pages if pages < _EXACT_PAGES else _size_class(pages - 1) + 1
        larger = self._nonempty >> size_class
        if larger:
            size_class += (larger & -larger).bit_length() - 1
            runs = self._classes[size_class]
            start, _ = runs.popitem()
            if not runs:
                self._nonempty ^= 1 << size_class
        else:
            found = self._search(pages)
            if found is None:
                return None
            start = found
        length = self._free_length.pop(start)
        del self._free_start[start + length]
        if length > pages:
            self._insert(start + pages, length - pages)
        self._taken[start] = pages
        self.free_bytes -= pages * PAGE_BYTES
        return start * PAGE_BYTES

    def release(self, offset: int) -> None:
        """Frees the run that begins at the byte offset `offset`, and merges it with adjacent free runs.

        Raises KeyError if no allocated run begins at `offset`.
        """
        start = offset // PAGE_BYTES
        length = self._taken.pop(start)
        self.free_bytes += length * PAGE_BYTES
        after = self._free_length.pop(start + length, 0)
        if after:
            self._unlink(start + length, after)
            del self._free_start[start + length + after]
            length += after
        before = self._free_start.pop(start, None)
        if before is not None:
            self._unlink(before, start - before)
            length += start - before
            start = before
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        size_class = length if length < _EXACT_PAGES else _size_class(length)
        self._classes[size_class][start] = None
        self._nonempty |= 1 << size_class
        self._free_length[start] = length
        self._free_start[start + length] = start

    def _unlink(self, start: int, length: int) -> None:
        size_class = length if length < _EXACT_PAGES else _size_class(length)
        runs = self._classes[size_class]
        del runs[start]
        if not runs:
            self._nonempty ^= 1 << size_class

    def _search(self, pages: int) -> int | None:
        """Removes the first free run with at least `pages` pages from the size class of `pages`.

        Returns the run's first page number, or None if that class contains no such run. Called only if all larger
        classes are empty.
        """
        size_class = _size_class(pages)
        if size_class >= len(self._classes):
            return None
        for start in self._classes[size_class]:
            length = self._free_length[start]
            if length >= pages:
                self._unlink(start, length)
                return start
        return None


def _size_class(pages: int) -> int:
    """Returns the index of the size class for free runs of `pages` pages."""
    if pages < _EXACT_PAGES:
        return pages
    shift = pages.bit_length() - _STEP_BITS - 1
    return (shift << _STEP_BITS) + (pages >> shift)


_MEMFD_PREFIX = "stagemesh-"
TOKEN_BYTES = 16
LAYOUT_NAME = b"stagemesh-arena2"
ALIGNMENT_BYTES = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The seals of every shared arena. A file that its producer has passed to a consumer is also sealed against writes."""
_SEAL_FUTURE_WRITE = 0x10
GENERATION_BYTES = 8


def data_offset(data_bytes: int) -> int:
    """Returns the offset of the first data page, in bytes, in a memory file with `data_bytes` bytes of data."""
    entries_per_page = PAGE_BYTES // GENERATION_BYTES
    # The table also has entries for its own pages.
    return PAGE_BYTES + -(-(1 + data_bytes // PAGE_BYTES) // (entries_per_page - 1)) * PAGE_BYTES


def data_offset_in(file_bytes: int) -> int:
    """Returns the offset of the first data page, in bytes, in a memory file with a total size of `file_bytes` bytes.

    Raises ValueError if `file_bytes` is not a multiple of the page size or leaves no space for data.
    """
    offset = PAGE_BYTES + -(-(file_bytes // PAGE_BYTES * GENERATION_BYTES) // PAGE_BYTES) * PAGE_BYTES
    if file_bytes % PAGE_BYTES or offset >= file_bytes:
        raise ValueError(f"a file of {file_bytes} bytes is not an arena")
    return offset


def mark_pages(memory: memoryview, *, offset: int, size_bytes: int, generation: int) -> None:
    """Sets the generation of the pages in a range to `generation`.

    The range begins at `offset` bytes from the start of the memory file and has `size_bytes` bytes.
    """
    first = PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES
    pages = size_bytes // PAGE_BYTES
    memory[first : first + pages * GENERATION_BYTES] = generation.to_bytes(GENERATION_BYTES, sys.byteorder) * pages


def free_pages(memory: memoryview, *, offset: int, size_bytes: int) -> None:
    """Sets the generation of the pages in a range to 0. Another process may allocate a page as soon as its entry is 0.

    Writes each table entry exactly once. `mark_pages` cannot be used here: it copies bytes, and the C library may write
    a byte twice while copying. The second write could clear the entry of a process that allocated the page between the
    two writes.
    """
    entries = memory.cast("Q")
    first = (PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES) // GENERATION_BYTES
    for entry in range(first, first + size_bytes // PAGE_BYTES):
        entries[entry] = 0


def pages_are_of(memory: memoryview, *, offset: int, size_bytes: int, generation: int) -> bool:
    """Returns whether all pages of a range have the generation `generation`.

    The range begins at `offset` bytes from the start of the memory file and has `size_bytes` bytes.
    """
    first = PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES
    pages = size_bytes // PAGE_BYTES
    wanted = generation.to_bytes(GENERATION_BYTES, sys.byteorder) * pages
    return memory[first : first + pages * GENERATION_BYTES].tobytes() == wanted


class Layout(NamedTuple):
    """The locations of tensors within a region."""

    offsets: tuple[int, ...]
    """The offset of each tensor, in bytes, from the start of the region."""
    size_bytes: int
    """The number of bytes that the region needs, including the gaps between tensors."""
    tensor_bytes: int
    """The total number of bytes of the tensors, without the gaps between tensors."""


def layout_of(tensors: Tensors) -> Layout:
    """Returns a layout of `tensors` in consecutive order. Each offset is a multiple of ALIGNMENT_BYTES.

    An empty tensor also receives its own offset. Raises InvalidChunkError if a tensor contains Python objects, because
    Python objects cannot be read by another process.
    """
    offsets: list[int] = []
    end = tensor_bytes = 0
    for name, tensor in tensors.items():
        if tensor.dtype.hasobject:
            raise InvalidChunkError(f"tensor {name!r} contains Python objects; send numbers")
        offsets.append(end)
        size_bytes = tensor.nbytes
        tensor_bytes += size_bytes
        end += (size_bytes or 1) + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES
    return Layout(tuple(offsets), end, tensor_bytes)


def copy_tensors(memory: memoryview, *, start: int, layout: Layout, tensors: Tensors) -> dict[str, Array]:
    """Copies tensors into `memory`. Returns views of the copies, by tensor name.

    The offsets in `layout` are relative to the byte offset `start` in `memory`.
    """
    views: dict[str, Array] = {}
    for (name, tensor), offset in zip(tensors.items(), layout.offsets, strict=True):
        view: Array = np.ndarray(tensor.shape, tensor.dtype, memory, start + offset)
        view[...] = tensor
        views[name] = view
    return views


def when_gone(arrays: Sequence[Array], call: Callable[[], None]) -> None:
    """Calls `call` once, when all `arrays` and all views of them have been deleted. `arrays` must not be empty.

    `call` runs in the thread that deletes the last view, and can interrupt that thread's code at any point.
    """
    assert arrays, "at least one array is needed"
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
"""The weak references that `when_gone` has created, by their ids. A weak reference must exist as long as its array.

`weakref.finalize` would have the same effect at twice the cost.
"""


def page_bytes_for(size_bytes: int) -> int:
    """Returns `size_bytes` rounded up to a whole number of pages. The result is at least one page."""
    return (size_bytes + PAGE_BYTES - 1 & -PAGE_BYTES) or PAGE_BYTES


def create_memory(data_bytes: int, token: bytes, *, shared: bool) -> tuple[int | None, mmap.mmap]:
    """Creates and allocates the memory of an arena. Writes `token` to the start of the memory.

    Returns a read-only file descriptor and a writable mapping of the memory. The file descriptor is None if the memory
    is not shared. Raises NotReadyError (NO_MEMORY) if not enough memory is available.
    """
    size_bytes = data_offset(data_bytes) + data_bytes
    available = available_bytes()
    if available is not None and size_bytes > available:
        # If the memory were allocated regardless, the kernel would kill this process or another process.
        raise _no_memory(size_bytes, f"{available >> 20} MiB are free")
    try:
        fd, mapping = _memory_file(size_bytes) if shared else (None, _private_memory(size_bytes))
    except OSError as exc:
        raise _no_memory(size_bytes, exc.strerror or str(exc)) from exc
    mapping[: TOKEN_BYTES + len(LAYOUT_NAME)] = token + LAYOUT_NAME
    return fd, mapping


def _memory_file(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Creates a sealed memory file. Returns a read-only file descriptor and a writable mapping of the file."""
    fd = os.memfd_create(f"{_MEMFD_PREFIX}arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), mapping
    finally:
        os.close(fd)


def seal_writes(fd: int) -> None:
    """Prevents all processes from opening or mapping the memory file `fd` to write into it. Not reversible.

    Mappings that exist remain writable. A read-only descriptor alone does not prevent writing: its owner can open the
    file again in /proc/self/fd. Raises OSError if the kernel does not support the seal.
    """
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    finally:
        os.close(writable)


def _private_memory(size_bytes: int) -> mmap.mmap:
    """Maps memory that is private to this process, with huge pages if the kernel supports them."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Without this advice, a fork could make this process copy a page while an RDMA device writes to the old page.
    mapping.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(mapping, np.uint8)[::PAGE_BYTES] = 0
    return mapping


def open_memory(process_id: int, descriptor: int) -> mmap.mmap:
    """Maps the memory file of a replica's process for reading and writing. `descriptor` is the process's descriptor.

    Raises NotReadyError (ARENA_NOT_SHARED) if the file cannot be opened.
    """
    path = Path(f"/proc/{process_id}/fd/{descriptor}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_MEMFD_PREFIX}"):
            raise not_shared("its replica has closed it")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)
    except OSError as exc:
        raise not_shared(exc.strerror or str(exc)) from exc


def not_shared(cause: str) -> NotReadyError:
    """Returns the error for a memory file that cannot be opened."""
    return NotReadyError(
        f"the replica's memory cannot be opened ({cause}); "
        "run its workers on its host, in its pid namespace, as its user",
        reason="ARENA_NOT_SHARED",
    )


def pin_if_cuda(memory: memoryview) -> None:
    """Page-locks memory, which makes copies to and from a CUDA device asynchronous.

    The memory remains locked until the process terminates. Does nothing unless torch is already imported in this
    process and has a CUDA device. Raises NotReadyError (CANNOT_PIN) if CUDA cannot page-lock the memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    code = int(torch.cuda.cudart().cudaHostRegister(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes, 0))
    if code:
        raise NotReadyError(
            f"CUDA cannot pin the arena of {memory.nbytes} bytes (error {code}); raise the limit on locked memory, "
            "or lower data_plane.arena_bytes",
            reason="CANNOT_PIN",
        )


def _no_memory(size_bytes: int, cause: str) -> NotReadyError:
    return NotReadyError(
        f"{size_bytes >> 20} MiB of memory for the arena are not available ({cause}); "
        "give the host or container more memory, or lower data_plane.arena_bytes",
        reason="NO_MEMORY",
    )
