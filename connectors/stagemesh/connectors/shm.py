"""The shm connector: a consumer maps the arena of a producer on the same host and reads regions in place.

That both share a host is proved, not assumed: the producer advertises random bytes, and whoever reads the
same bytes at the start of the memory file has found the right file on the right host.
"""

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagemesh.connectors.allocator import PAGE_BYTES
from stagemesh.connectors.arena import MEMFD_NAME, SEALS, TOKEN_BYTES, data_offset
from stagemesh.connectors.errors import InvalidChunkError
from stagemesh.connectors.tensors import Array, checked_layout
from stagemesh.v1 import stage_pb2, tensor_pb2


class PeerArena:
    """A producer's arena, mapped for reading. Unmapped when the last view is gone."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._size_bytes = len(mapping)
        self._data_offset, pages = _split(self._size_bytes)
        self._generations: npt.NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, count=pages, offset=PAGE_BYTES)

    def view(self, message: tensor_pb2.Tensor) -> Array:
        """A read-only view of the tensor's region; raises InvalidChunkError for a region that is not what it claims."""
        region = message.shm
        dtype, shape = checked_layout(message, size_bytes=region.size_bytes)
        end = region.offset + region.size_bytes
        if region.offset < self._data_offset or end > self._size_bytes or region.offset % dtype.itemsize:
            raise InvalidChunkError(f"tensor {message.name!r} lies outside its producer's arena")
        first, last = (self._page(region.offset), self._page(end - 1))
        if not self._generations[first] == self._generations[last] == region.generation:
            raise InvalidChunkError(
                f"tensor {message.name!r} names a region that is no longer its own", reason="STALE_REGION"
            )
        count = region.size_bytes // dtype.itemsize
        return np.frombuffer(self._mapping, dtype, count=count, offset=region.offset).reshape(shape)

    def _page(self, offset: int) -> int:
        return (offset - self._data_offset) // PAGE_BYTES


def attach(advertisement: stage_pb2.ArenaAdvertisement) -> PeerArena | None:
    """Maps the advertised arena, or returns None where it does not lie on this host (or is not readable from here)."""
    path = Path(f"/proc/{advertisement.process_id}/fd/{advertisement.file_descriptor}")
    try:
        # Only ever open a memory file: opening some other descriptor could block or have effects.
        if not str(path.readlink()).startswith(f"/memfd:{MEMFD_NAME}"):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _map(fd, advertisement)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def hold_lease(tensors: list[Array], release: Callable[[], None]) -> None:
    """Calls `release` once, from whatever thread, when the last of `tensors` and all views of them are gone."""
    left = [len(tensors)]

    def one_gone() -> None:
        left[0] -= 1
        if left[0] == 0:
            release()

    for tensor in tensors:
        # Further views refer to the array over the mapping, not to the reshaped one.
        owner = tensor.base if isinstance(tensor.base, np.ndarray) else tensor
        weakref.finalize(owner, one_gone).atexit = False


def _map(fd: int, advertisement: stage_pb2.ArenaAdvertisement) -> PeerArena | None:
    size_bytes = os.fstat(fd).st_size
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    if not sealed or size_bytes != advertisement.size_bytes or size_bytes <= 2 * PAGE_BYTES:
        return None
    mapping = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
    if not secrets.compare_digest(mapping[:TOKEN_BYTES], advertisement.token):
        return None
    return PeerArena(mapping)


def _split(size_bytes: int) -> tuple[int, int]:
    """The data's offset and number of pages in a memory file of `size_bytes`; ValueError where there is none."""
    data_bytes = 1 << (size_bytes.bit_length() - 1)
    if data_offset(data_bytes) + data_bytes != size_bytes:
        raise ValueError(f"a file of {size_bytes} bytes is no arena")
    return size_bytes - data_bytes, data_bytes // PAGE_BYTES
