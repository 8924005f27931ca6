"""Plans the transfers of one fetch, and the locations of the data in the memory that receives it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES, GENERATION_BYTES
from stagemesh.connectors.arena.page_allocator import PAGE_BYTES
from stagemesh.connectors.base import ArenaRange, Bytes

TRANSFER_DESCRIPTORS = 256
"""The maximum number of descriptors in one transfer."""

Descriptor: TypeAlias = tuple[int, int, int]
"""A memory range as the nixl library expects it: address, size in bytes and device."""


class Transfer(NamedTuple):
    """A transfer of several ranges. Each remote range is read into the local range with the same index."""

    local: list[Descriptor]
    remote: list[Descriptor]
    size_bytes: int


class Span(NamedTuple):
    """A run of bytes that are adjacent in both the arena (at `offset`) and the landing memory (at `landing`)."""

    offset: int
    landing: int
    size_bytes: int


class TransferPlan:
    """Plans the read of some ranges of an arena and checks the result.

    The landing memory contains the ranges, each with the same alignment as in the arena, followed by the generations of
    the ranges' pages. The generations must be read last. If a page still has the expected generation then, the page was
    not freed during the read.
    """

    __slots__ = ("_ends", "_generations", "_generations_at", "_spans", "_starts", "data_bytes", "size_bytes")

    def __init__(self, places: Sequence[ArenaRange], *, data_offset: int, file_bytes: int) -> None:
        """Plans the read of `places`.

        Raises InvalidChunkError if a range is outside the arena's data, or if its generation is invalid.
        """
        self._spans: list[Span] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._generations: dict[int, int] = {}
        self.data_bytes = 0
        for place in places:
            offset, size_bytes = place.offset, place.size_bytes
            if size_bytes < 0 or not data_offset <= offset < file_bytes or offset + size_bytes > file_bytes:
                raise InvalidChunkError(f"{size_bytes} bytes at {offset} are outside their producer's arena")
            self._expect(place)
            start = self._place(offset, size_bytes) if size_bytes else self.data_bytes
            self._starts.append(start)
            self._ends.append(start + size_bytes)
        self._generations_at = _aligned(self.data_bytes)
        self.size_bytes = self._generations_at + len(self._generations) * GENERATION_BYTES

    def data_transfers(self, *, local: int, remote: int, transfer_bytes: int) -> list[Transfer]:
        """Returns the data transfers of the ranges, with at most `transfer_bytes` each.

        `local` is the address of the landing memory, and `remote` is the address of the arena.
        """
        ranges = (
            (local + landing + start, remote + offset + start, min(transfer_bytes, size_bytes - start))
            for offset, landing, size_bytes in self._spans
            for start in range(0, size_bytes, transfer_bytes)
        )
        return list(_grouped(ranges, transfer_bytes))

    def generation_transfers(self, *, local: int, remote: int) -> list[Transfer]:
        """Returns the transfers of the generations, which must not start before all data has arrived.

        `local` is the address of the landing memory, and `remote` is the address of the arena.
        """
        local += self._generations_at
        remote += PAGE_BYTES
        ranges = (
            (local + number * GENERATION_BYTES, remote + page * GENERATION_BYTES, GENERATION_BYTES)
            for number, page in enumerate(self._generations)
        )
        return list(_grouped(ranges, TRANSFER_DESCRIPTORS * GENERATION_BYTES))

    def views(self, landing: Bytes) -> list[Bytes]:
        """Returns views of the ranges in the landing memory after the read is complete.

        Raises InvalidChunkError (STALE_REGION) if a region was freed before the read was complete.
        """
        generations = landing[self._generations_at : self.size_bytes].view(np.uint64)
        if generations.tolist() != list(self._generations.values()):
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
        """Reserves landing memory for a range and returns the range's offset in that memory."""
        if self._spans:
            before = self._spans[-1]
            gap_bytes = offset - before.offset - before.size_bytes
            # Also reads an alignment gap, which is cheaper than another descriptor. The gap is in the same pages.
            if 0 <= gap_bytes < ALIGNMENT_BYTES:
                start = self.data_bytes + gap_bytes
                self._spans[-1] = before._replace(size_bytes=before.size_bytes + gap_bytes + size_bytes)
                self.data_bytes = start + size_bytes
                return start
        start = _aligned(self.data_bytes) + offset % ALIGNMENT_BYTES
        self._spans.append(Span(offset, start, size_bytes))
        self.data_bytes = start + size_bytes
        return start


def _grouped(ranges: Iterator[tuple[int, int, int]], transfer_bytes: int) -> Iterator[Transfer]:
    """Groups ranges, given as local address, remote address and size, into transfers of bounded size."""
    local: list[Descriptor] = []
    remote: list[Descriptor] = []
    total = 0
    for ours, theirs, size_bytes in ranges:
        if local and (total + size_bytes > transfer_bytes or len(local) == TRANSFER_DESCRIPTORS):
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
    return InvalidChunkError("a range belongs to a region that was freed", reason="STALE_REGION")
