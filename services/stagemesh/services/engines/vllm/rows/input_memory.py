"""The memory that the replica and vLLM's workers share for the input rows of requests.

A row belongs to one token position of a request. It has one or more columns, for example the row's embedding. The
memory has one slot for each running request. It is a sparse file: the pages of a slot are allocated when data is
written, and freed when the slot is released.
"""

import mmap
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagemesh.common.errors import NotReadyError
from stagemesh.common.tensors import DTYPES, Array


@dataclass(frozen=True)
class Column:
    """A column of the input rows: `width` values of one dtype for each token position."""

    name: str
    dtype: str
    """The name of the dtype. The name is the same in the API and in torch."""
    width: int

    def size_bytes(self, positions: int) -> int:
        """Returns the size of the column in a slot with `positions` rows, in bytes, rounded up to whole pages."""
        return -(-positions * self.width * DTYPES[self.dtype].itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class InputTicket:
    """The data that a worker process needs to open the shared memory for input rows."""

    process_id: int
    file_descriptor: int
    slots: int
    positions: int
    """The number of rows in a slot. Equals the maximum number of tokens in the model's context."""
    columns: list[Column]

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes."""
        return sum(column.size_bytes(self.positions) for column in self.columns)


class InputMemory:
    """The shared memory for input rows, mapped into one process."""

    def __init__(self, ticket: InputTicket) -> None:
        """Maps the shared memory into this process. Raises NotReadyError if the memory's file cannot be opened."""
        self.ticket = ticket
        path = f"/proc/{ticket.process_id}/fd/{ticket.file_descriptor}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapping = mmap.mmap(fd, ticket.slots * ticket.slot_bytes)
            finally:
                os.close(fd)
        except OSError as exc:
            raise NotReadyError(
                f"the replica's embeddings cannot be opened ({exc.strerror or exc}); run its workers on its host, in "
                "its pid namespace, as its user",
                reason="ARENA_NOT_SHARED",
            ) from exc

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Views of the columns, [slots, positions, width], by name.

        The replica writes rows through the views, and workers read them. A row contains zeros until it is written.
        """
        views: dict[str, Array] = {}
        offset, slot_bytes = 0, self.ticket.slot_bytes
        for column in self.ticket.columns:
            dtype, positions = DTYPES[column.dtype], self.ticket.positions
            row_bytes = column.width * dtype.itemsize
            views[column.name] = np.ndarray(
                (self.ticket.slots, positions, column.width),
                dtype,
                self._mapping,
                offset,
                strides=(slot_bytes, row_bytes, dtype.itemsize),
            )
            offset += column.size_bytes(positions)
        return views

    def clear(self, slot: int) -> None:
        """Frees the memory pages of a slot. The slot contains zeros afterwards."""
        size_bytes = self.ticket.slot_bytes
        self._mapping.madvise(mmap.MADV_REMOVE, slot * size_bytes, size_bytes)
