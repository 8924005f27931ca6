"""How the ranges of one fetch become pieces of a transfer, and where each lands."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagemesh.connectors.allocator import PAGE_BYTES
from stagemesh.connectors.connector import ArenaRange, Bytes
from stagemesh.connectors.errors import InvalidChunkError
from stagemesh.connectors.memory_file import ALIGNMENT_BYTES, GENERATION_BYTES, data_offset_in

PART_BYTES = 1 << 20
"""Bytes of a transfer. On one host its start blocks for the whole copy, so that others wait for one part at most."""
PART_PIECES = 256


class Memory(NamedTuple):
    """Memory that an agent may read into or be read from."""

    address: int
    size_bytes: int
    kind: str = "DRAM"
    """As the library calls it."""
    device: int = 0


class Piece(NamedTuple):
    """Bytes to read: where to in this process, and where from in the peer's."""

    local: int
    remote: int
    size_bytes: int


@dataclass
class _Span:
    """Bytes that are read as one: neighbours in the arena stay neighbours."""

    offset: int
    landing: int
    size_bytes: int


class Plan:
    """What to read for some ranges of an arena, and whether what came is them.

    The landing holds the ranges, each as well aligned as in the arena, then the generations of their pages. Those are
    to be read last: pages that then still have the wanted one had it while they were read.
    """

    def __init__(self, places: Sequence[ArenaRange], *, file_bytes: int) -> None:
        """Raises InvalidChunkError for a range outside the arena's data, or one that no region can hold."""
        self._spans: list[_Span] = []
        self._starts: list[int] = []
        self._sizes = [place.size_bytes for place in places]
        self._generations: dict[int, int] = {}
        first_offset = data_offset_in(file_bytes)
        for place in places:
            _check(place, first_offset=first_offset, file_bytes=file_bytes)
            self._expect(place)
            self._starts.append(self._place(place))
        self.data_bytes = self._end()
        self._words_at = _aligned(self.data_bytes)
        self.size_bytes = self._words_at + len(self._generations) * GENERATION_BYTES

    def steps(self, *, local: int, remote: int) -> Iterator[Iterator[list[Piece]]]:
        """The transfers, each of the addresses of landing and arena; a step's may run at once, steps one by one."""
        if self._spans:
            yield _parts(self._pieces(local=local, remote=remote))
        yield _parts(self._words(local=local, remote=remote))

    def views(self, landing: Bytes) -> list[Bytes]:
        """The ranges as they lie in a landing that was read into. Raises InvalidChunkError (STALE_REGION)."""
        words = np.ndarray(len(self._generations), np.uint64, landing.data, self._words_at)
        if words.tolist() != list(self._generations.values()):
            raise _stale()
        return [landing[start : start + size] for start, size in zip(self._starts, self._sizes, strict=True)]

    def _expect(self, place: ArenaRange) -> None:
        last = place.offset + max(place.size_bytes - 1, 0)
        for page in (place.offset // PAGE_BYTES, last // PAGE_BYTES):
            if self._generations.setdefault(page, place.generation) != place.generation:
                raise _stale()

    def _place(self, place: ArenaRange) -> int:
        if not place.size_bytes:
            return self._end()
        span = self._spans[-1] if self._spans else None
        # A gap of alignment is read too: that is cheaper than another piece, and it lies in the same pages.
        if span and 0 <= place.offset - span.offset - span.size_bytes < ALIGNMENT_BYTES:
            span.size_bytes = place.offset + place.size_bytes - span.offset
            return span.landing + place.offset - span.offset
        start = _aligned(self._end()) + place.offset % ALIGNMENT_BYTES
        self._spans.append(_Span(place.offset, start, place.size_bytes))
        return start

    def _end(self) -> int:
        return self._spans[-1].landing + self._spans[-1].size_bytes if self._spans else 0

    def _pieces(self, *, local: int, remote: int) -> Iterator[Piece]:
        for span in self._spans:
            for start in range(0, span.size_bytes, PART_BYTES):
                size_bytes = min(PART_BYTES, span.size_bytes - start)
                yield Piece(local + span.landing + start, remote + span.offset + start, size_bytes)

    def _words(self, *, local: int, remote: int) -> Iterator[Piece]:
        for number, page in enumerate(self._generations):
            source = remote + PAGE_BYTES + page * GENERATION_BYTES
            yield Piece(local + self._words_at + number * GENERATION_BYTES, source, GENERATION_BYTES)


def _parts(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups for one transfer each."""
    part: list[Piece] = []
    part_bytes = 0
    for piece in pieces:
        if part and (part_bytes + piece.size_bytes > PART_BYTES or len(part) == PART_PIECES):
            yield part
            part, part_bytes = [], 0
        part.append(piece)
        part_bytes += piece.size_bytes
    if part:
        yield part


def _check(place: ArenaRange, *, first_offset: int, file_bytes: int) -> None:
    offset, size_bytes, generation = place
    if size_bytes < 0 or not first_offset <= offset < file_bytes or offset + size_bytes > file_bytes:
        raise InvalidChunkError(f"{size_bytes} bytes at {offset} lie outside their producer's arena")
    if not 0 < generation < 1 << 64:
        raise _stale()


def _aligned(offset: int) -> int:
    return offset + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES


def _stale() -> InvalidChunkError:
    return InvalidChunkError("a range belongs to a region that is no longer its own", reason="STALE_REGION")
