"""The memory in which a replica leaves embeddings for its engine's workers, a place for each running request.

It is a memory file with more room than it ever takes: pages exist once they are written and are given back with their
place. Workers read it whenever a step needs rows, also again after a preemption. What the scheduler allows to be
computed (`limits`) tells them nothing; it only lets no step run before its rows are there. Imports nothing of vLLM.
"""

import mmap
import os
from dataclasses import dataclass

import msgspec
import numpy as np

from stagemesh.common.errors import NotReadyError
from stagemesh.common.tensors import DTYPES, Array

EMBEDDED_ARGUMENT = "stagemesh_embedded"
"""Under this name a request's `SamplingParams.extra_args` hold an `Embedded`, as builtins."""

PLACEHOLDER = 0
"""The token that stands for an embedding in a prompt."""


class Embedded(msgspec.Struct, frozen=True):
    """A request that takes embeddings."""

    place: int
    prompt_tokens: int
    """Rows before this position stand for tokens, rows from it on are added to those of the sampled tokens."""


@dataclass(frozen=True)
class EmbeddingTicket:
    """What a worker process needs to read the memory."""

    process_id: int
    file_descriptor: int
    places: int
    positions: int
    """The rows of a place."""
    width: int
    dtype: str
    """In the contract's and torch's words."""

    @property
    def place_bytes(self) -> int:
        """Of whole pages."""
        size_bytes = self.positions * self.width * DTYPES[self.dtype].itemsize
        return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class EmbeddingMemory:
    """One process's view of it."""

    def __init__(self, ticket: EmbeddingTicket, *, own: int | None = None) -> None:
        """`own` is the descriptor of a file to be closed here. Raises NotReadyError where it cannot be opened."""
        self.ticket = ticket
        self._own = own
        path = f"/proc/{ticket.process_id}/fd/{ticket.file_descriptor}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapping = mmap.mmap(fd, ticket.places * ticket.place_bytes)
            finally:
                os.close(fd)
        except OSError as exc:
            raise NotReadyError(
                f"the replica's embeddings cannot be opened ({exc.strerror or exc}); run its workers on its host, in "
                "its pid namespace, as its user"
            ) from exc

    def rows(self, place: int, position: int, count: int) -> Array:
        """Some rows of a place, [count, width], to be written by the replica and read by a worker; zeros at first."""
        ticket = self.ticket
        assert 0 <= place < ticket.places, f"place {place} of {ticket.places}"
        assert 0 <= position <= position + count <= ticket.positions, f"{count} rows at {position}"
        dtype = DTYPES[ticket.dtype]
        offset = place * ticket.place_bytes + position * ticket.width * dtype.itemsize
        return np.frombuffer(self._mapping, dtype, count * ticket.width, offset).reshape(count, ticket.width)

    def close(self) -> None:
        """Closes the file of a replica's own memory; who has it mapped keeps it. Closing twice is harmless."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def clear(self, place: int) -> None:
        """Gives a place's pages back; it holds zeros again."""
        size_bytes = self.ticket.place_bytes
        self._mapping.madvise(mmap.MADV_REMOVE, place * size_bytes, size_bytes)


def make_memory(*, places: int, positions: int, width: int, dtype: str) -> EmbeddingMemory:
    """A replica's own. Its file lives as long as this process."""
    fd = os.memfd_create("stagemesh-embeddings", os.MFD_CLOEXEC)
    ticket = EmbeddingTicket(os.getpid(), fd, places, positions, width, dtype)
    os.ftruncate(fd, places * ticket.place_bytes)
    return EmbeddingMemory(ticket, own=fd)


encode_ticket = msgspec.msgpack.Encoder().encode
decode_ticket = msgspec.msgpack.Decoder(EmbeddingTicket).decode
