"""Reads from the arena of one peer: the plan of a read and the check of its result, and the schedule of transfers.

A read consists of several transfers. Reads start transfers in turn.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from stagemesh.common.errors import InvalidChunkError, UnavailableError
from stagemesh.connectors.arena.memory import ALIGNMENT_BYTES, GENERATION_BYTES, PAGE_BYTES
from stagemesh.connectors.base import ArenaRange, Bytes

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

READ_TIMEOUT_S = 3.0
"""The time limit in seconds for one transfer. If a transfer takes longer, the peer is marked as failed."""
WINDOW_BYTES = 4 << 20
"""The maximum number of bytes in flight from one peer.

The value is large enough to use a fast network fully, and small enough that a small read starts soon.
"""
_IN_FLIGHT_TRANSFER_BYTES = WINDOW_BYTES // 4
_COPIED_TRANSFER_BYTES = 2 << 20
"""The maximum size in bytes of a transfer within one host.

Such a transfer is a memory copy, and blocks other reads for about half a millisecond.
"""
TRANSFER_DESCRIPTORS = 256
"""The maximum number of descriptors in one transfer. A descriptor is a memory range."""
_NO_MEMORY: Bytes = np.empty(0, np.uint8)

Descriptor: TypeAlias = tuple[int, int, int]
"""A memory range as the nixl library expects it: address, size in bytes, and device number."""


class Transfer(NamedTuple):
    """A transfer of several ranges. Each remote range is read into the local range with the same index."""

    local: list[Descriptor]
    remote: list[Descriptor]
    size_bytes: int


class Span(NamedTuple):
    """A contiguous range of an arena that is read into a contiguous range of the landing memory.

    `offset` is the start in the arena file, and `landing` is the start in the landing memory, both in bytes.
    """

    offset: int
    landing: int
    size_bytes: int


class TransferPlan:
    """Plans the read of several ranges of an arena and checks the result.

    The landing memory contains the ranges, each with the same alignment as in the arena, followed by the generations of
    the ranges' pages. The generations must be read after the data. If a page then still has the expected generation,
    the page was not freed during the read.
    """

    __slots__ = ("_generations", "_generations_at", "_parts", "_spans", "data_bytes", "size_bytes")

    def __init__(self, places: Sequence[ArenaRange], *, data_offset: int, file_bytes: int) -> None:
        """Plans the read of the ranges in `places`.

        `data_offset` is the start of the data in the arena file, and `file_bytes` is the file's size, both in bytes.
        Raises InvalidChunkError if a range is outside the arena's data, or if a range's generation is invalid.
        """
        self._spans: list[Span] = []
        self._parts: list[slice[int, int, None]] = []
        self._generations: dict[int, int] = {}
        self.data_bytes = 0
        for place in places:
            offset, size_bytes = place.offset, place.size_bytes
            if size_bytes < 0 or not data_offset <= offset < file_bytes or offset + size_bytes > file_bytes:
                raise InvalidChunkError(f"{size_bytes} bytes at {offset} are outside their producer's arena")
            self._expect(place)
            start = self._place(offset, size_bytes) if size_bytes else self.data_bytes
            self._parts.append(slice(start, start + size_bytes))
        self._generations_at = _aligned(self.data_bytes)
        self.size_bytes = self._generations_at + len(self._generations) * GENERATION_BYTES

    def data_transfers(self, *, local: int, remote: int, transfer_bytes: int) -> list[Transfer]:
        """Returns the transfers that read the data of all ranges, each with at most `transfer_bytes` bytes.

        `local` is the address of the landing memory, and `remote` is the address of the arena file's first byte.
        """
        ranges = (
            (local + landing + start, remote + offset + start, min(transfer_bytes, size_bytes - start))
            for offset, landing, size_bytes in self._spans
            for start in range(0, size_bytes, transfer_bytes)
        )
        return list(_grouped(ranges, transfer_bytes))

    def generation_transfers(self, *, local: int, remote: int) -> list[Transfer]:
        """Returns the transfers that read the generations of the ranges' pages.

        Start these transfers only after all data has arrived. `local` is the address of the landing memory, and
        `remote` is the address of the arena file's first byte.
        """
        local += self._generations_at
        remote += PAGE_BYTES
        ranges = (
            (local + number * GENERATION_BYTES, remote + page * GENERATION_BYTES, GENERATION_BYTES)
            for number, page in enumerate(self._generations)
        )
        return list(_grouped(ranges, TRANSFER_DESCRIPTORS * GENERATION_BYTES))

    def views(self, landing: Bytes) -> list[Bytes]:
        """Returns one view of the landing memory for each range. Call this method after the read is complete.

        Raises InvalidChunkError (STALE_REGION) if a region was freed before the read was complete.
        """
        generations = landing[self._generations_at : self.size_bytes].view(np.uint64)
        if generations.tolist() != list(self._generations.values()):
            raise _stale()
        return [landing[part] for part in self._parts]

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
        """Reserves landing memory for a range. Returns the start of this memory as an offset in the landing memory."""
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
    """Groups ranges into transfers of at most `transfer_bytes` bytes and TRANSFER_DESCRIPTORS ranges.

    Each range is a tuple of local address, remote address and size in bytes. No range may exceed `transfer_bytes`
    bytes.
    """
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


@dataclass(eq=False, slots=True)
class Read:
    """A read of several ranges of a remote arena.

    The transfers in `data` read the ranges. The transfers in `marks` read the generations of the ranges' pages, which
    show whether the data is still valid. The transfers in `marks` start after all transfers in `data` have ended. The
    read references `landing`, the destination memory, until no transfer can write to this memory and `take_landing` was
    called.
    """

    data: list[Transfer]
    marks: list[Transfer]
    landing: Bytes
    completion: asyncio.Future[None] | None = None
    """A future that completes when the read has ended. None if no task waits for the read."""
    failure: str = ""
    """The reason why the read failed. Empty if the read has not failed.

    An error in `completion` would reference the task's frames, and thereby retain the landing memory.
    """
    _started: int = 0
    _in_flight: int = 0
    _is_abandoned: bool = False

    def take(self) -> Transfer | None:
        """Returns the next transfer and counts it as in flight. Returns None if no transfer can start now."""
        number = self._started - len(self.data)
        if self._is_abandoned or number == len(self.marks) or (number == 0 and self._in_flight):
            return None
        self._started += 1
        self._in_flight += 1
        return self.data[number] if number < 0 else self.marks[number]

    def end_transfer(self) -> None:
        """Records that one of the read's transfers in flight has ended."""
        self._in_flight -= 1

    @property
    def is_complete(self) -> bool:
        """Whether no transfer is in flight and no further transfer will start."""
        return not self._in_flight and (self._is_abandoned or self._started == len(self.data) + len(self.marks))

    def take_landing(self) -> Bytes:
        """Returns the destination memory of a complete read. The read no longer references this memory.

        The read thread may reference the read for some time after its completion.
        """
        landing, self.landing = self.landing, _NO_MEMORY
        return landing

    def abandon(self) -> None:
        """Prevents further transfers of the read from starting, because the caller no longer waits for the read."""
        self._is_abandoned = True

    def finish(self, failure: str = "") -> None:
        """Marks the read as ended. `failure` is the reason why the read failed, or empty if the read succeeded.

        Call this method exactly once, from any thread.
        """
        self.failure = failure
        if self.completion is not None:
            loop = self.completion.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_complete, self.completion)


class _TransferInFlight(NamedTuple):
    read: Read
    size_bytes: int
    deadline: float


class RemoteReads:
    """Schedules the reads from one serving agent. Hold the read thread's lock while calling any method."""

    def __init__(self, agent: "Agent", name: str) -> None:
        self._agent = agent
        self.name = name
        self.failure = ""
        """The reason why the peer can no longer be read. Empty if the peer has not failed."""
        self.is_removed = False
        """Whether the peer has failed and all transfers from the peer have ended. A new connection is then possible."""
        self._fresh: deque[Read] = deque()
        """The fresh reads, oldest first. A read is fresh until the scheduler selects it for the first time."""
        self._reads: deque[Read] = deque()
        """The unfinished reads that the scheduler has selected at least once, in the order of their next selection.

        These reads are large, or they wait for transfers in flight.
        """
        self._fresh_bytes = 0
        """The number of bytes of fresh reads that were started since the last selection of a read in `_reads`."""
        self._transfers_in_flight: dict[int, _TransferInFlight] = {}
        self._in_flight_bytes = 0
        self.transfer_bytes = _COPIED_TRANSFER_BYTES
        """The maximum size of one transfer in bytes."""
        self.copies = False
        """Whether the last transfer was already complete when it was started, as a copy within one host usually is."""

    @property
    def has_reads(self) -> bool:
        """Whether the peer has unfinished reads."""
        return bool(self._fresh or self._reads)

    @property
    def has_work(self) -> bool:
        """Whether the peer has unfinished reads or transfers in flight."""
        return bool(self._fresh or self._reads or self._transfers_in_flight)

    def add(self, read: Read) -> None:
        """Queues a read, or fails the read immediately if the peer has failed."""
        if self.failure:
            read.finish(self.failure)
        else:
            self._fresh.append(read)

    def read_at_once(self, read: Read) -> bool:
        """Starts all transfers of a read that can start now. Returns whether the read is complete.

        An incomplete read is abandoned, but retained until its transfers have ended.
        """
        while not self.failure and (transfer := read.take()):
            self._start(read, transfer)
        is_complete = read.is_complete and not self.failure
        if not is_complete:
            read.abandon()
            self.add(read)
        return is_complete

    def advance(self) -> bool:
        """Polls the transfers in flight, and starts transfers of one read.

        Returns whether a transfer has ended, a read was finished, or transfers could be started.
        """
        has_ended = self._poll()
        return self._launch() or has_ended

    def fail(self, failure: str) -> None:
        """Marks the peer as failed for the reason `failure`, and fails all reads from the peer.

        Transfers in flight retain their landing memory until they have ended.
        """
        self.failure = self.failure or failure
        for reads in (self._fresh, self._reads):
            while reads:
                reads.popleft().finish(self.failure)
        self._remove_if_idle()

    def discard(self, failure: str) -> None:
        """Fails all reads with the reason `failure`.

        Call this method after the agent was closed. Closing the agent ends all transfers.
        """
        self._transfers_in_flight.clear()
        self.is_removed = True
        self.fail(failure)

    def _poll(self) -> bool:
        has_ended = False
        for handle, each in list(self._transfers_in_flight.items()):
            try:
                if not self._agent.is_done(handle, peer=self.name):
                    if not self.failure and time.monotonic() > each.deadline:
                        self.fail(f"{self.name} has not answered for {READ_TIMEOUT_S:g} s")
                    continue
            except UnavailableError as exc:
                self.failure = self.failure or exc.message
            has_ended = True
            del self._transfers_in_flight[handle]
            self._in_flight_bytes -= each.size_bytes
            each.read.end_transfer()
        if has_ended and self.failure:
            self.fail(self.failure)
        return has_ended

    def _launch(self) -> bool:
        """Starts transfers of one read. Returns False if no read could start a transfer or be finished.

        Fresh reads have priority until transfers of `transfer_bytes` bytes have been started for them. A small read
        therefore waits for at most one transfer of a large read.
        """
        if self._fresh and (not self._reads or self._fresh_bytes < self.transfer_bytes):
            read = self._fresh.popleft()
            self._fresh_bytes += self._turn(read)
            if not self._finish_if_complete(read):
                self._reads.append(read)
            return True
        self._fresh_bytes = 0
        for _ in range(len(self._reads)):
            read = self._reads.popleft()
            started_bytes = self._turn(read)
            is_complete = self._finish_if_complete(read)
            if not is_complete:
                self._reads.append(read)
            if started_bytes or is_complete:
                return True
        return False

    def _turn(self, read: Read) -> int:
        """Starts transfers of a read, about `transfer_bytes` bytes in total.

        Returns the total size in bytes of the started transfers.
        """
        started_bytes = 0
        while started_bytes < self.transfer_bytes and self._in_flight_bytes < WINDOW_BYTES and not self.failure:
            transfer = read.take()
            if transfer is None:
                break
            self._start(read, transfer)
            started_bytes += transfer.size_bytes
        return started_bytes

    def _finish_if_complete(self, read: Read) -> bool:
        """Finishes a read if the read is complete or the peer has failed. Returns whether the read was finished."""
        if self.failure or read.is_complete:
            read.finish(self.failure)
            return True
        return False

    def _start(self, read: Read, transfer: Transfer) -> None:
        try:
            handle = self._agent.read(self.name, transfer)
        except UnavailableError as exc:
            read.end_transfer()
            self.fail(exc.message)
            return
        if handle is None:
            self.transfer_bytes, self.copies = _COPIED_TRANSFER_BYTES, True
            read.end_transfer()
            return
        # The first read of a connection is asynchronous even on one host.
        self.transfer_bytes, self.copies = _IN_FLIGHT_TRANSFER_BYTES, False
        deadline = time.monotonic() + READ_TIMEOUT_S
        self._transfers_in_flight[handle] = _TransferInFlight(read, transfer.size_bytes, deadline)
        self._in_flight_bytes += transfer.size_bytes

    def _remove_if_idle(self) -> None:
        if self.failure and not self._transfers_in_flight and not self.is_removed:
            self._agent.remove_peer(self.name)
            self.is_removed = True


def _complete(completion: asyncio.Future[None]) -> None:
    if not completion.done():
        completion.set_result(None)
