"""The memory of an arena: its creation, its layout, and the layout of tensors in it.

The first page begins with a random token and the layout's name. A table with the generation of every page follows, then
the data. A page's generation is the number of the region that holds it, or 0 for a free page or a page before the data.
A reader compares generations to detect a region that was freed and reused since it was offered.
A shared arena is a sealed memfd: no process can shrink it while another reads it, and the kernel frees it with its last
holder.
"""

import fcntl
import mmap
import os
import sys
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.common.memory import available_bytes
from stagemesh.common.tensors import Array, Tensors
from stagemesh.connectors.arena.page_allocator import PAGE_BYTES

MEMFD_NAME = "stagemesh-arena"
TOKEN_BYTES = 16
LAYOUT_NAME = b"stagemesh-arena2"
ALIGNMENT_BYTES = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
GENERATION_BYTES = 8


def data_offset(data_bytes: int) -> int:
    """Returns the offset of the data in a file that has space for `data_bytes`."""
    entries_per_page = PAGE_BYTES // GENERATION_BYTES
    # The table also has entries for its own pages.
    return PAGE_BYTES + -(-(1 + data_bytes // PAGE_BYTES) // (entries_per_page - 1)) * PAGE_BYTES


def data_offset_in(file_bytes: int) -> int:
    """Returns the offset of the data in a file of `file_bytes`. Raises ValueError if it has no space for data."""
    offset = PAGE_BYTES + -(-(file_bytes // PAGE_BYTES * GENERATION_BYTES) // PAGE_BYTES) * PAGE_BYTES
    if file_bytes % PAGE_BYTES or offset >= file_bytes:
        raise ValueError(f"a file of {file_bytes} bytes is not an arena")
    return offset


def mark_pages(memory: memoryview, *, offset: int, size_bytes: int, generation: int) -> None:
    """Sets the generation of the pages at `offset` of the file."""
    first = PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES
    pages = size_bytes // PAGE_BYTES
    memory[first : first + pages * GENERATION_BYTES] = generation.to_bytes(GENERATION_BYTES, sys.byteorder) * pages


def free_pages(memory: memoryview, *, offset: int, size_bytes: int) -> None:
    """Clears the generation of pages that another process may allocate at once.

    Each entry is stored exactly once. `mark_pages` copies bytes, and the C library may store a byte twice when it
    copies: the second store could clear the mark of a process that allocated the page between the two.
    """
    entries = memory.cast("Q")
    first = (PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES) // GENERATION_BYTES
    for entry in range(first, first + size_bytes // PAGE_BYTES):
        entries[entry] = 0


def pages_are_of(memory: memoryview, *, offset: int, size_bytes: int, generation: int) -> bool:
    """Returns whether all pages of a range have this generation."""
    first = PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES
    pages = size_bytes // PAGE_BYTES
    wanted = generation.to_bytes(GENERATION_BYTES, sys.byteorder) * pages
    return memory[first : first + pages * GENERATION_BYTES].tobytes() == wanted


class Layout(NamedTuple):
    """The places of tensors within a region."""

    offsets: tuple[int, ...]
    size_bytes: int
    tensor_bytes: int
    """The tensors' bytes without the gaps between them."""


def layout_of(tensors: Tensors) -> Layout:
    """Returns a layout that places tensors one after the other, aligned. A tensor without elements has a place too.

    Raises InvalidChunkError for Python objects, which mean nothing to another process.
    """
    offsets: list[int] = []
    end = tensor_bytes = 0
    for name, tensor in tensors.items():
        if tensor.dtype.hasobject:
            raise InvalidChunkError(f"tensor {name!r} holds Python objects; send numbers")
        offsets.append(end)
        size_bytes = tensor.nbytes
        tensor_bytes += size_bytes
        end += (size_bytes or 1) + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES
    return Layout(tuple(offsets), end, tensor_bytes)


def copy_tensors(memory: memoryview, *, start: int, layout: Layout, tensors: Tensors) -> dict[str, Array]:
    """Copies tensors to the places of `layout`, which count from `start` of the file. Returns views of the copies."""
    views: dict[str, Array] = {}
    for (name, tensor), offset in zip(tensors.items(), layout.offsets, strict=True):
        view: Array = np.ndarray(tensor.shape, tensor.dtype, memory, start + offset)
        view[...] = tensor
        views[name] = view
    return views


def page_bytes_for(size_bytes: int) -> int:
    """Returns `size_bytes` rounded up to whole pages, at least one page."""
    return (size_bytes + PAGE_BYTES - 1 & -PAGE_BYTES) or PAGE_BYTES


def create_memory_file(data_bytes: int, token: bytes) -> tuple[int, mmap.mmap]:
    """Creates a sealed memory file whose memory is reserved and touched.

    Returns a read-only descriptor for readers and the writable mapping. Raises NotReadyError (NO_MEMORY).
    """
    size_bytes = _checked_size(data_bytes)
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        mapping[: TOKEN_BYTES + len(LAYOUT_NAME)] = token + LAYOUT_NAME
        # Readers receive a descriptor that cannot be mapped for writing.
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), mapping
    except OSError as exc:
        raise _no_memory(size_bytes, exc.strerror or str(exc)) from exc
    finally:
        os.close(fd)


def create_private_memory(data_bytes: int, token: bytes) -> tuple[int, mmap.mmap]:
    """Creates memory of the same layout that no other process can map, in huge pages if the kernel has them.

    Returns -1 instead of a descriptor, and the mapping. Raises NotReadyError (NO_MEMORY).
    """
    size_bytes = _checked_size(data_bytes)
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork would make this process copy pages that an RDMA device goes on writing to.
        mapping.madvise(mmap.MADV_DONTFORK)
    except OSError as exc:
        raise _no_memory(size_bytes, exc.strerror or str(exc)) from exc
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(mapping, np.uint8)[::PAGE_BYTES] = 0
    mapping[: TOKEN_BYTES + len(LAYOUT_NAME)] = token + LAYOUT_NAME
    return -1, mapping


def _checked_size(data_bytes: int) -> int:
    """Returns the size of the whole memory. Raises NotReadyError (NO_MEMORY) if so much is not available."""
    size_bytes = data_offset(data_bytes) + data_bytes
    available = available_bytes()
    if available is not None and size_bytes > available:
        # Allocated anyway, the kernel would kill this process or another one.
        raise _no_memory(size_bytes, f"{available >> 20} MiB are free")
    return size_bytes


def _no_memory(size_bytes: int, cause: str) -> NotReadyError:
    return NotReadyError(
        f"no {size_bytes >> 20} MiB of shared memory for the arena ({cause}); "
        "give the host or container more memory, or lower data_plane.arena_bytes",
        reason="NO_MEMORY",
    )
