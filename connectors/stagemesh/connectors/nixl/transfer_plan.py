"""How the ranges of one fetch become transfers, and where each lands."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES, GENERATION_BYTES
from stagemesh.connectors.arena.page_allocator import PAGE_BYTES
from stagemesh.connectors.base import ArenaRange, Bytes

PART_PIECES = 256
"""The most pieces in one transfer."""

Descriptor: TypeAlias = tuple[int, int, int]
"""Address, size in bytes and device, as the library takes them."""


class Memory(NamedTuple):
    """Memory that an agent may read into or be read from."""

    address: int
    size_bytes: int
    kind: str = "DRAM"
    """As the library calls it."""
    device: int = 0


class Transfer(NamedTuple):
    """Pieces to read, each of the peer's memory into as many bytes of ours."""

    local: list[Descriptor]
    remote: list[Descriptor]
    size_bytes: int


class Span(NamedTuple):
    """Bytes that are read as one: neighbours in the arena stay neighbours. Offsets are of the arena and the landing."""

    offset: int
    landing: int
    size_bytes: int


class TransferPlan:
    """What to read for some ranges of an arena, and whether what came is them.

    The landing holds the ranges, each as well aligned as in the arena, then the generations of their pages. Those are
    to be read last: pages that then still have the wanted one had it while they were read.
    """

    __slots__ = ("_ends", "_generations", "_spans", "_starts", "_words_at", "data_bytes", "size_bytes")

    def __init__(self, places: Sequence[ArenaRange], *, data_offset: int, file_bytes: int) -> None:
        """Raises InvalidChunkError for a range outside the arena's data, or one that no region can hold."""
        self._spans: list[Span] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._generations: dict[int, int] = {}
        self.data_bytes = 0
        for place in places:
            offset, size_bytes = place.offset, place.size_bytes
            if size_bytes < 0 or not data_offset <= offset < file_bytes or offset + size_bytes > file_bytes:
                raise InvalidChunkError(f"{size_bytes} bytes at {offset} lie outside their producer's arena")
            self._expect(place)
            start = self._place(offset, size_bytes) if size_bytes else self.data_bytes
            self._starts.append(start)
            self._ends.append(start + size_bytes)
        self._words_at = _aligned(self.data_bytes)
        self.size_bytes = self._words_at + len(self._generations) * GENERATION_BYTES

    def data(self, *, local: int, remote: int, part_bytes: int) -> list[Transfer]:
        """The ranges' transfers, of `part_bytes` at most, given the addresses of landing and arena."""
        pieces = (
            (local + landing + start, remote + offset + start, min(part_bytes, size_bytes - start))
            for offset, landing, size_bytes in self._spans
            for start in range(0, size_bytes, part_bytes)
        )
        return list(_grouped(pieces, part_bytes))

    def words(self, *, local: int, remote: int) -> list[Transfer]:
        """The generations' transfers, for when the data have come."""
        local += self._words_at
        remote += PAGE_BYTES
        pieces = (
            (local + number * GENERATION_BYTES, remote + page * GENERATION_BYTES, GENERATION_BYTES)
            for number, page in enumerate(self._generations)
        )
        return list(_grouped(pieces, PART_PIECES * GENERATION_BYTES))

    def views(self, landing: Bytes) -> list[Bytes]:
        """The ranges as they lie in a landing that was read into. Raises InvalidChunkError (STALE_REGION)."""
        words = landing[self._words_at : self.size_bytes].view(np.uint64)
        if words.tolist() != list(self._generations.values()):
            raise _stale()
        return [landing[start:end] for start, end in zip(self._starts, self._ends, strict=True)]

    def _expect(self, place: ArenaRange) -> None:
        offset, size_bytes, generation = place
        if not 0 < generation < 1 << 64:
            raise _stale()
        expected = self._generations
        first, last = offset // PAGE_BYTES, (offset + size_bytes - 1) // PAGE_BYTES
        if expected.setdefault(first, generation) != generation:
            raise _stale()
        if last > first and expected.setdefault(last, generation) != generation:
            raise _stale()

    def _place(self, offset: int, size_bytes: int) -> int:
        """Where in the landing a range comes to lie."""
        if self._spans:
            before = self._spans[-1]
            gap_bytes = offset - before.offset - before.size_bytes
            # A gap of alignment is read too: that is cheaper than another piece, and it lies in the same pages.
            if 0 <= gap_bytes < ALIGNMENT_BYTES:
                start = self.data_bytes + gap_bytes
                self._spans[-1] = before._replace(size_bytes=before.size_bytes + gap_bytes + size_bytes)
                self.data_bytes = start + size_bytes
                return start
        start = _aligned(self.data_bytes) + offset % ALIGNMENT_BYTES
        self._spans.append(Span(offset, start, size_bytes))
        self.data_bytes = start + size_bytes
        return start


def _grouped(pieces: Iterator[tuple[int, int, int]], part_bytes: int) -> Iterator[Transfer]:
    """Pieces, as local and remote address and size, in transfers of bounded size."""
    local: list[Descriptor] = []
    remote: list[Descriptor] = []
    total = 0
    for ours, theirs, size_bytes in pieces:
        if local and (total + size_bytes > part_bytes or len(local) == PART_PIECES):
            yield Transfer(local, remote, total)
            local, remote, total = [], [], 0
        local.append((ours, size_bytes, 0))
        remote.append((theirs, size_bytes, 0))
        total += size_bytes
    if local:
        yield Transfer(local, remote, total)


def _aligned(offset: int) -> int:
    return offset + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES


def _stale() -> InvalidChunkError:
    return InvalidChunkError("a range belongs to a region that is no longer its own", reason="STALE_REGION")
