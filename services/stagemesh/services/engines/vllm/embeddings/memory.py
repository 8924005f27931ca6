"""Shared memory through which a replica passes embeddings to vLLM's workers. Each running request has one slot.

The memory is a sparse file. The pages of a slot are allocated when they are written, and freed when the slot is
released. A worker reads a row again if the row's step is repeated after a preemption. The scheduler runs a step only
after the step's rows are in the memory (`run_ahead`). This module does not import vLLM.
"""

import mmap
import os
from dataclasses import dataclass

import msgspec
import numpy as np

from stagemesh.common.errors import NotReadyError
from stagemesh.common.tensors import DTYPES, Array

PLACEHOLDER = 0
"""The id of the token that represents an embedding in a prompt."""


class Embedded(msgspec.Struct, frozen=True):
    """The slot that contains a request's embeddings, and the length of the request's prompt.

    The replica sends this object to vLLM's workers with the request (`extra_arguments`).
    """

    slot: int
    prompt_tokens: int
    """The number of prompt tokens.

    Rows before this position replace the embeddings of the placeholder tokens. Later rows are added to the embeddings
    of sampled tokens.
    """


@dataclass(frozen=True)
class EmbeddingTicket:
    """The data that a worker process needs to open the shared memory."""

    process_id: int
    file_descriptor: int
    slots: int
    positions: int
    """The number of rows in a slot: one for each token position that the model supports."""
    width: int
    dtype: str
    """The name of the rows' dtype, which is the same in the API and in torch."""

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes, rounded up to whole pages."""
        size_bytes = self.positions * self.width * DTYPES[self.dtype].itemsize
        return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class EmbeddingMemory:
    """The mapping of the shared memory into one process."""

    def __init__(self, ticket: EmbeddingTicket, *, own: int | None = None) -> None:
        """Maps the memory into this process. Raises NotReadyError if the memory's file cannot be opened.

        `own` is the file descriptor that `close` closes, or None if another process owns the file.
        """
        self.ticket = ticket
        self._own = own
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
                "its pid namespace, as its user"
            ) from exc

    def rows(self, slot: int, position: int, count: int) -> Array:
        """Returns a view of `count` rows of a slot, starting at `position`. The view has the shape [count, width].

        The replica writes rows through the view, and workers read them. A row contains zeros until it is written.
        """
        ticket = self.ticket
        assert 0 <= slot < ticket.slots, f"slot {slot} of {ticket.slots}"
        assert 0 <= position <= position + count <= ticket.positions, f"{count} rows at {position}"
        dtype = DTYPES[ticket.dtype]
        offset = slot * ticket.slot_bytes + position * ticket.width * dtype.itemsize
        return np.frombuffer(self._mapping, dtype, count * ticket.width, offset).reshape(count, ticket.width)

    def close(self) -> None:
        """Closes the file if this process owns it. Existing mappings remain valid. Idempotent."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def clear(self, slot: int) -> None:
        """Frees the memory pages of a slot. The slot contains zeros afterwards."""
        size_bytes = self.ticket.slot_bytes
        self._mapping.madvise(mmap.MADV_REMOVE, slot * size_bytes, size_bytes)


def create_memory(*, slots: int, positions: int, width: int, dtype: str) -> EmbeddingMemory:
    """Creates the shared memory of a replica, with `slots` slots of `positions` rows of `width` values.

    The memory is an anonymous file (`memfd_create`), which the kernel frees after the processes that use it have ended.
    """
    fd = os.memfd_create("stagemesh-embeddings", os.MFD_CLOEXEC)
    ticket = EmbeddingTicket(os.getpid(), fd, slots, positions, width, dtype)
    os.ftruncate(fd, slots * ticket.slot_bytes)
    return EmbeddingMemory(ticket, own=fd)


encode_ticket = msgspec.msgpack.Encoder().encode
decode_ticket = msgspec.msgpack.Decoder(EmbeddingTicket).decode
