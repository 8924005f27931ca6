"""The writer with which a worker process writes tensors into its replica's arena without messages to the replica.

The replica reserves a partition of the arena for each worker. A page of the partition is free if its entry in the
arena's generation table is 0. Only the worker sets entries, and only the replica clears entries, so that neither
process needs a lock.
"""

import math
import os
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, InvalidChunkError, UnavailableError
from stagemesh.common.wire.tensors import DTYPES, Array, Tensors, dtype_name
from stagemesh.connectors.arena import memory as memory_file
from stagemesh.connectors.arena.memory import PAGE_BYTES

WRITER_SHIFT = 48
"""The bit position of the writer's number in a generation.

The top 16 bits of a generation are the writer's number. The replica's own number is 0. The lower 48 bits are the number
of the region among the writer's regions.
"""

_PAUSES = Backoff(first_s=20e-6, longest_s=2e-3)


@dataclass(frozen=True)
class PartitionAddress:
    """The data with which one worker process opens its partition of the replica's arena. Picklable.

    `offset` is the partition's offset, in bytes, from the start of the memory file.
    """

    process_id: int
    file_descriptor: int
    token: bytes
    writer: int
    offset: int
    size_bytes: int


class PlacedTensor(NamedTuple):
    """The name, dtype, shape and location of one tensor of a `Handle`.

    `offset` is the tensor's offset, in bytes, from the start of the handle's pages.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Handle:
    """The description of one write of a worker process: the pages and the tensors in them. Picklable.

    The worker sends the handle to the replica. The replica then adopts the tensors.
    """

    generation: int
    offset: int
    size_bytes: int
    tensors: tuple[PlacedTensor, ...]


class Reserved(NamedTuple):
    """Reserved memory in a worker's partition. The caller fills `tensors` and then sends `handle` to the replica."""

    handle: Handle
    tensors: Mapping[str, Array]


class ArenaWriter:
    """A writer of tensors into a worker's partition.

    Create one writer for each address, and use it in one thread only.
    """

    def __init__(self, address: PartitionAddress) -> None:
        self._address = address
        mapping = memory_file.open_memory(address.process_id, address.file_descriptor)
        if mapping[: memory_file.TOKEN_BYTES] != address.token:
            raise memory_file.not_shared("it belongs to another replica")
        self._memory = memoryview(mapping)
        self._generations: npt.NDArray[np.uint64] = np.frombuffer(
            self._memory,
            np.uint64,
            count=address.size_bytes // PAGE_BYTES,
            offset=PAGE_BYTES + address.offset // PAGE_BYTES * memory_file.GENERATION_BYTES,
        )
        self._replica = os.pidfd_open(address.process_id)
        self._next_page = 0
        self._count = 0

    def reserve(self, tensors: Tensors, *, timeout_s: float = math.inf) -> "Reserved":
        """Reserves memory for tensors with the names, dtypes and shapes of `tensors`. Does not copy their contents.

        Waits up to `timeout_s` seconds for free memory. Raises InvalidChunkError if the tensors are larger than the
        partition, DeadlineError if the time limit is exceeded, and UnavailableError if the replica has terminated.
        """
        dtypes = [dtype_name(tensor) for tensor in tensors.values()]
        layout = memory_file.layout_of(tensors)
        size_bytes = memory_file.page_bytes_for(layout.size_bytes)
        page = self._wait_for_space(size_bytes // PAGE_BYTES, timeout_s)
        offset = self._address.offset + page * PAGE_BYTES
        self._count += 1
        generation = (self._address.writer << WRITER_SHIFT) + self._count
        memory_file.mark_pages(self._memory, offset=offset, size_bytes=size_bytes, generation=generation)
        self._next_page = page + size_bytes // PAGE_BYTES
        placed = tuple(
            PlacedTensor(name, dtype, tensor.shape, at)
            for (name, tensor), dtype, at in zip(tensors.items(), dtypes, layout.offsets, strict=True)
        )
        handle = Handle(generation, offset, size_bytes, placed)
        return Reserved(handle, {one.name: _view(one, handle, self._memory) for one in placed})

    def try_reserve(self, tensors: Tensors) -> "Reserved | None":
        """Reserves memory like `reserve`, but returns None if not enough memory is free now."""
        try:
            return self.reserve(tensors, timeout_s=0.0)
        except DeadlineError:
            return None

    @property
    def room(self) -> memoryview:
        """The memory of the worker's whole partition. The caller may page-lock this memory."""
        return self._memory[self._address.offset : self._address.offset + self._address.size_bytes]

    def close(self) -> None:
        """Closes the file descriptor of the replica's process. The written tensors remain valid. Idempotent."""
        if self._replica >= 0:
            os.close(self._replica)
            self._replica = -1

    def _wait_for_space(self, pages: int, timeout_s: float) -> int:
        if pages > len(self._generations):
            raise InvalidChunkError(
                f"{pages * PAGE_BYTES} bytes exceed the worker's partition of {self._address.size_bytes}; raise its "
                "size",
                reason="CHUNK_TOO_LARGE",
            )
        deadline_s = time.monotonic() + timeout_s
        retries = _PAUSES.retries()
        while (page := self._find_free(pages)) is None:
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"the worker's partition of {self._address.size_bytes} bytes had no space for {timeout_s} s, "
                    "because the tensors in it were not read; allow more time or raise its size",
                    reason="ARENA_FULL",
                )
            if self._replica_has_ended():
                raise UnavailableError("the replica that this worker belongs to has terminated", reason="PEER_LOST")
            time.sleep(retries.next_s())
        return page

    def _find_free(self, pages: int) -> int | None:
        """Returns the index of the first page of a free run of `pages` pages, or None if there is no such run.

        Searches cyclically from the end of the most recently reserved run.
        """
        start = self._next_page
        if start + pages <= len(self._generations) and not self._generations[start : start + pages].any():
            return start
        # Searches a copy, because numpy fails if the replica clears entries during the search.
        taken = np.flatnonzero(self._generations.copy())
        starts = np.concatenate(([0], taken + 1))
        ends = np.concatenate((taken, [len(self._generations)]))
        fitting = starts[ends - starts >= pages]
        if not fitting.size:
            return None
        return int(fitting[np.searchsorted(fitting, start) % fitting.size])

    def _replica_has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._replica, select.POLLIN)
        return bool(poll.poll(0))


def read_handle(handle: Handle, memory: memoryview, *, offset: int, size_bytes: int) -> dict[str, Array]:
    """Returns the tensors of a worker's handle, by tensor name, as views of `memory`. Called by the replica.

    Raises InvalidChunkError if the handle's pages or tensors are not inside the worker's partition. Also raises
    InvalidChunkError (STALE_REGION) if the pages do not have the handle's generation.
    """
    inside = offset <= handle.offset < handle.offset + handle.size_bytes <= offset + size_bytes
    if not inside or handle.offset % PAGE_BYTES or handle.size_bytes % PAGE_BYTES:
        raise InvalidChunkError("a worker's handle is outside its partition")
    if not memory_file.pages_are_of(
        memory, offset=handle.offset, size_bytes=handle.size_bytes, generation=handle.generation
    ):
        raise InvalidChunkError("a worker's handle names pages that are not its own", reason="STALE_REGION")
    return {tensor.name: _view(tensor, handle, memory) for tensor in handle.tensors}


def without_content(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> dict[str, Array]:
    """Returns a placeholder tensor of zeros for each name and shape in `shapes`.

    `dtypes` contains the key in `DTYPES` of each tensor's dtype, by tensor name.

    The tensors use almost no memory, because all elements of a tensor share the memory of one element.
    """
    return {name: np.broadcast_to(np.zeros((), DTYPES[dtypes[name]]), shape) for name, shape in shapes.items()}


def _view(tensor: PlacedTensor, handle: Handle, memory: memoryview) -> Array:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or tensor.offset < 0 or any(dim < 0 for dim in tensor.shape):
        raise InvalidChunkError(f"tensor {tensor.name!r} of a worker's handle is not valid")
    if (
        tensor.offset % memory_file.ALIGNMENT_BYTES
        or tensor.offset + math.prod(tensor.shape) * dtype.itemsize > handle.size_bytes
    ):
        raise InvalidChunkError(f"tensor {tensor.name!r} is outside its worker's handle")
    return np.ndarray(tensor.shape, dtype, memory, handle.offset + tensor.offset)
