"""The memory file of an arena: how it is made, what stands where in it, and how tensors are laid into it.

The first page begins with a random token and the layout's name. Then comes a table with the generation of every page
of the file, then the data. A page's generation is the number of the region that holds it, 0 while it is free (and for
pages before the data), so that a reader can tell a region that was given away since from the one that it was promised.
The file is a sealed memfd: nobody can shrink it under a reader, and nothing is left when its holders are gone.
"""

import fcntl
import mmap
import os
import sys
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
    """Where the data begins in a file for `data_bytes`."""
    entries_per_page = PAGE_BYTES // GENERATION_BYTES
    # The table has entries for its own pages too.
    return PAGE_BYTES + -(-(1 + data_bytes // PAGE_BYTES) // (entries_per_page - 1)) * PAGE_BYTES


def data_offset_in(file_bytes: int) -> int:
    """Where the data begins in a file of `file_bytes`; ValueError where it has no place for any."""
    offset = PAGE_BYTES + -(-(file_bytes // PAGE_BYTES * GENERATION_BYTES) // PAGE_BYTES) * PAGE_BYTES
    if file_bytes % PAGE_BYTES or offset >= file_bytes:
        raise ValueError(f"a file of {file_bytes} bytes is no arena")
    return offset


def mark_pages(memory: memoryview, *, offset: int, size_bytes: int, generation: int) -> None:
    """Writes the generation of the pages that lie at `offset` of the file."""
    first = PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES
    pages = size_bytes // PAGE_BYTES
    memory[first : first + pages * GENERATION_BYTES] = generation.to_bytes(GENERATION_BYTES, sys.byteorder) * pages


def free_pages(memory: memoryview, *, offset: int, size_bytes: int) -> None:
    """Clears the generation of pages that another process may take at once.

    Each entry is stored once. `mark_pages` copies bytes, for which the C library may store the same ones twice: who
    came between the two would find its own mark cleared.
    """
    entries = memory.cast("Q")
    first = (PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES) // GENERATION_BYTES
    for entry in range(first, first + size_bytes // PAGE_BYTES):
        entries[entry] = 0


def pages_are_of(memory: memoryview, *, offset: int, size_bytes: int, generation: int) -> bool:
    """Whether all pages of a range have this generation."""
    first = PAGE_BYTES + offset // PAGE_BYTES * GENERATION_BYTES
    pages = size_bytes // PAGE_BYTES
    wanted = generation.to_bytes(GENERATION_BYTES, sys.byteorder) * pages
    return memory[first : first + pages * GENERATION_BYTES].tobytes() == wanted


class Layout(NamedTuple):
    """Where tensors lie within a region."""

    offsets: tuple[int, ...]
    size_bytes: int
    tensor_bytes: int
    """Without what lies between them."""


def layout_of(tensors: Tensors) -> Layout:
    """Places tensors one behind the other, aligned; one without elements has a place too.

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
    """Copies tensors to where `layout` has them, counted from `start` of the file; returns views of the copies."""
    views: dict[str, Array] = {}
    for (name, tensor), offset in zip(tensors.items(), layout.offsets, strict=True):
        view: Array = np.ndarray(tensor.shape, tensor.dtype, memory, start + offset)
        view[...] = tensor
        views[name] = view
    return views


def page_bytes_for(size_bytes: int) -> int:
    """The bytes of the whole pages, at least one, that hold `size_bytes`."""
    return (size_bytes + PAGE_BYTES - 1 & -PAGE_BYTES) or PAGE_BYTES


def create_memory_file(data_bytes: int, token: bytes) -> tuple[int, mmap.mmap]:
    """A sealed memory file, all memory reserved and touched: a descriptor for readers, and the mapping to write by.

    Raises NotReadyError (NO_MEMORY).
    """
    size_bytes = data_offset(data_bytes) + data_bytes
    available = available_bytes()
    if available is not None and size_bytes > available:
        # Allocated anyway, the kernel would kill this process or another one.
        raise _no_memory(size_bytes, f"{available >> 20} MiB are free")
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        mapping[: TOKEN_BYTES + len(LAYOUT_NAME)] = token + LAYOUT_NAME
        # What is handed to readers cannot be mapped for writing.
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), mapping
    except OSError as exc:
        raise _no_memory(size_bytes, exc.strerror or str(exc)) from exc
    finally:
        os.close(fd)


def _no_memory(size_bytes: int, cause: str) -> NotReadyError:
    return NotReadyError(
        f"no {size_bytes >> 20} MiB of shared memory for the arena ({cause}); "
        "give the host or container more memory, or lower data_plane.arena_bytes",
        reason="NO_MEMORY",
    )
