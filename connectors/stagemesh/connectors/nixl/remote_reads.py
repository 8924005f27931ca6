"""Schedules the reads of one peer: reads take turns, and each consists of transfers."""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.base import Bytes
from stagemesh.connectors.nixl.transfer_plan import Transfer

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

READ_TIMEOUT_S = 3.0
"""The longest time for one transfer. A peer that exceeds it fails."""
WINDOW_BYTES = 4 << 20
"""The most bytes in flight from one peer: enough to keep a fast wire busy, few enough that a small read starts soon."""
_IN_FLIGHT_TRANSFER_BYTES = WINDOW_BYTES // 4
_COPIED_TRANSFER_BYTES = 2 << 20
"""The size of a transfer that is a copy on one host. It blocks other reads while it runs, for half a millisecond."""


class Read:
    """One fetch: transfers of data, and transfers that may start only when the data has arrived.

    It references `landing`, the memory that is read into, until no transfer writes to it any more.
    """

    __slots__ = (
        "_completion",
        "_data",
        "_in_flight",
        "_is_abandoned",
        "_started",
        "_transfers",
        "failure",
        "is_over",
        "landing",
    )

    def __init__(self, data: list[Transfer], then: list[Transfer], *, landing: Bytes) -> None:
        self._transfers = data + then
        self._data = len(data)
        self._started = 0
        self._in_flight = 0
        self.landing = landing
        self._completion: asyncio.Future[None] | None = None
        self._is_abandoned = False
        self.is_over = False
        self.failure = ""

    def take(self) -> Transfer | None:
        """Returns the next transfer to start, or None if there is none yet or none left."""
        started = self._started
        if started == len(self._transfers) or self._is_abandoned or (started == self._data and self._in_flight):
            return None
        self._started += 1
        self._in_flight += 1
        return self._transfers[started]

    def end_transfer(self) -> None:
        """Counts a transfer that has ended."""
        self._in_flight -= 1

    @property
    def is_complete(self) -> bool:
        """Whether no transfer is in flight and none is left to start."""
        return not self._in_flight and (self._started == len(self._transfers) or self._is_abandoned)

    def abandon(self) -> None:
        """Starts no further transfers: the caller no longer waits for the read."""
        self._is_abandoned = True

    def expect(self) -> None:
        """Prepares `wait`. Call it before another thread can finish the read."""
        self._completion = asyncio.get_running_loop().create_future()

    def finish(self, failure: str = "") -> None:
        """Ends `wait`, with an error if there is a failure. Call it once, in any thread."""
        self.failure, self.is_over = failure, True
        if self._completion is not None:
            loop = self._completion.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, self._completion)

    async def wait(self) -> None:
        """Returns when the read is complete. Raises UnavailableError if it failed."""
        if not self.is_over:
            assert self._completion is not None, "`expect` comes before another thread gets the read"
            try:
                await self._completion
            except asyncio.CancelledError:
                self.abandon()
                raise
        if self.failure:
            raise UnavailableError(self.failure)


class _TransferInFlight(NamedTuple):
    read: Read
    size_bytes: int
    deadline: float


class RemoteReads:
    """The reads of one serving agent. The read thread calls all methods, under its lock."""

    def __init__(self, agent: "Agent", name: str) -> None:
        self._agent = agent
        self.name = name
        self.failure = ""
        """Why the peer is not read any more. Empty while it is."""
        self.is_removed = False
        """Whether the peer has failed and its last transfer has ended, so that it can be connected again."""
        self._fresh: deque[Read] = deque()
        """Reads that have not had a turn."""
        self._reads: deque[Read] = deque()
        """Reads that have had a turn: they are large, or wait for transfers in flight."""
        self._fresh_bytes = 0
        """Bytes of fresh reads since another read had a turn."""
        self._transfers_in_flight: dict[int, _TransferInFlight] = {}
        self._in_flight_bytes = 0
        self.transfer_bytes = _COPIED_TRANSFER_BYTES
        """The largest size of one transfer."""
        self.copies = False
        """Whether the last transfer was complete as soon as it was started, which a copy on one host is."""

    @property
    def has_reads(self) -> bool:
        """Whether a caller waits for a read."""
        return bool(self._fresh or self._reads)

    @property
    def has_work(self) -> bool:
        """Whether there are reads, or transfers in flight."""
        return bool(self._fresh or self._reads or self._transfers_in_flight)

    def add(self, read: Read) -> None:
        """Adds a read to the fresh ones, or fails it if the peer has failed."""
        if self.failure:
            read.finish(self.failure)
        else:
            self._fresh.append(read)

    def read_at_once(self, read: Read) -> bool:
        """Runs a read and returns whether it is complete. If it is not, it is abandoned and kept until it has ended."""
        while not self.failure and (transfer := read.take()):
            self._start(read, transfer)
        is_complete = read.is_complete and not self.failure
        if not is_complete:
            read.abandon()
            self.add(read)
        return is_complete

    def advance(self) -> bool:
        """Polls the transfers in flight and gives one read a turn. Returns whether anything happened."""
        has_ended = self._poll()
        return self._launch() or has_ended

    def fail(self, failure: str) -> None:
        """Fails all reads. A transfer in flight keeps its landing memory until it has ended."""
        self.failure = self.failure or failure
        for reads in (self._fresh, self._reads):
            while reads:
                reads.popleft().finish(self.failure)
        self._remove_if_idle()

    def discard(self, failure: str) -> None:
        """Fails all reads after the agent was closed, which has ended all transfers."""
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
        """Gives one read a turn and returns whether it did. Fresh reads go first, up to the bytes of one transfer,
        so that a small read waits for at most one transfer of a large one.
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
        """Starts transfers of a read, with about the bytes of one large transfer, and returns their bytes."""
        started_bytes = 0
        while started_bytes < self.transfer_bytes and self._in_flight_bytes < WINDOW_BYTES and not self.failure:
            transfer = read.take()
            if transfer is None:
                break
            self._start(read, transfer)
            started_bytes += transfer.size_bytes
        return started_bytes

    def _finish_if_complete(self, read: Read) -> bool:
        """Finishes a read that is complete or whose peer has failed. Returns whether it did."""
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


def _wake(completion: asyncio.Future[None]) -> None:
    if not completion.done():
        completion.set_result(None)
