"""Memory through which a replica passes embeddings to its engine's workers. Each running request has one slot.

The memory is a sparse file. A slot's pages are allocated when they are written, and released with the slot. A worker
reads the rows of every step that needs them, also after a preemption. The scheduler runs no step before its rows are in
the memory (`run_ahead`). This module does not import vLLM.
"""

import mmap
import os
from dataclasses import dataclass

import msgspec
import numpy as np

from stagemesh.common.errors import NotReadyError
from stagemesh.common.tensors import DTYPES, Array

PLACEHOLDER = 0
"""The token that represents an embedding in a prompt."""


class Embedded(msgspec.Struct, frozen=True):
    """A request's argument for vLLM's processes: the slot that contains its embeddings."""

    slot: int
    prompt_tokens: int
    """The number of prompt tokens.

    Rows before this position replace the embeddings of the prompt. Later rows are added to the embeddings of sampled
    tokens.
    """


@dataclass(frozen=True)
class EmbeddingTicket:
    """The information that a worker process needs to open the memory."""

    process_id: int
    file_descriptor: int
    slots: int
    positions: int
    """The number of rows in a slot."""
    width: int
    dtype: str
    """The rows' dtype, by its name in the API and in torch."""

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes, rounded up to whole pages."""
        size_bytes = self.positions * self.width * DTYPES[self.dtype].itemsize
        return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class EmbeddingMemory:
    """One process's mapping of the memory."""

    def __init__(self, ticket: EmbeddingTicket, *, own: int | None = None) -> None:
        """Maps the memory. Raises NotReadyError if the file cannot be opened.

        `own` is the file's descriptor, which `close` closes. None if this process does not own the file.
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
        """Returns a view of a slot's rows, [count, width]. The replica writes it and a worker reads it.

        Rows are zero until they are written.
        """
        ticket = self.ticket
        assert 0 <= slot < ticket.slots, f"slot {slot} of {ticket.slots}"
        assert 0 <= position <= position + count <= ticket.positions, f"{count} rows at {position}"
        dtype = DTYPES[ticket.dtype]
        offset = slot * ticket.slot_bytes + position * ticket.width * dtype.itemsize
        return np.frombuffer(self._mapping, dtype, count * ticket.width, offset).reshape(count, ticket.width)

    def close(self) -> None:
        """Closes the file if this process owns it. Existing mappings stay valid. May be called more than once."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def clear(self, slot: int) -> None:
        """Releases a slot's pages. The slot then contains zeros."""
        size_bytes = self.ticket.slot_bytes
        self._mapping.madvise(mmap.MADV_REMOVE, slot * size_bytes, size_bytes)


def create_memory(*, slots: int, positions: int, width: int, dtype: str) -> EmbeddingMemory:
    """Creates a replica's memory. Its file exists at most until this process ends."""
    fd = os.memfd_create("stagemesh-embeddings", os.MFD_CLOEXEC)
    ticket = EmbeddingTicket(os.getpid(), fd, slots, positions, width, dtype)
    os.ftruncate(fd, slots * ticket.slot_bytes)
    return EmbeddingMemory(ticket, own=fd)


encode_ticket = msgspec.msgpack.Encoder().encode
decode_ticket = msgspec.msgpack.Decoder(EmbeddingTicket).decode
