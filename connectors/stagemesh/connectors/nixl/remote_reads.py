"""What is read from one peer: reads that take turns, and the transfers of theirs that are under way."""

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
"""For one transfer, from its start; a peer that lets it pass is given up."""
WINDOW_BYTES = 4 << 20
"""Bytes under way from one peer: enough to keep a fast wire busy, few enough that a small read is soon served."""
_FLYING_PART_BYTES = WINDOW_BYTES // 4
_COPIED_PART_BYTES = 2 << 20
"""Of a transfer that is a copy on one host and blocks while it lasts: others wait for one part, half a millisecond."""


class Read:
    """One fetch: transfers of data, and some that may start only when those are done.

    `landing` stays referred to, and its memory so reserved, until nothing writes to it.
    """

    __slots__ = (
        "_data",
        "_flying",
        "_is_abandoned",
        "_over",
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
        self._flying = 0
        self.landing = landing
        self._over: asyncio.Future[None] | None = None
        self._is_abandoned = False
        self.is_over = False
        self.failure = ""

    def take(self) -> Transfer | None:
        """The next transfer to start; None where there is none, or not before those under way are done."""
        started = self._started
        if started == len(self._transfers) or self._is_abandoned or (started == self._data and self._flying):
            return None
        self._started += 1
        self._flying += 1
        return self._transfers[started]

    def landed(self) -> None:
        """A transfer is over."""
        self._flying -= 1

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be done."""
        return not self._flying and (self._started == len(self._transfers) or self._is_abandoned)

    def abandon(self) -> None:
        """Nobody waits for it: nothing more of it is started."""
        self._is_abandoned = True

    def expect(self) -> None:
        """Makes `wait` possible; to be called before another thread can finish it."""
        self._over = asyncio.get_running_loop().create_future()

    def finish(self, failure: str = "") -> None:
        """Tells who waits. In whatever thread, once."""
        self.failure, self.is_over = failure, True
        if self._over is not None:
            loop = self._over.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, self._over)

    async def wait(self) -> None:
        """Returns when it is read. Raises UnavailableError."""
        if not self.is_over:
            assert self._over is not None, "expected before it was handed over"
            try:
                await self._over
            except asyncio.CancelledError:
                self.abandon()
                raise
        if self.failure:
            raise UnavailableError(self.failure)


class _Flight(NamedTuple):
    read: Read
    size_bytes: int
    deadline: float


class RemoteReads:
    """A serving agent that is read from. All methods are the pump's, under its lock."""

    def __init__(self, agent: "Agent", name: str) -> None:
        self._agent = agent
        self.name = name
        self.failure = ""
        """Why it is not read from any more; empty while it is."""
        self.is_gone = False
        """Whether nothing of it is left, so that it may be met again."""
        self._fresh: deque[Read] = deque()
        """Reads that have not had a turn."""
        self._reads: deque[Read] = deque()
        """The others, which are large, or wait for what is under way."""
        self._ahead_bytes = 0
        """What fresh reads have had since one of the others had a turn."""
        self._flights: dict[int, _Flight] = {}
        self._flying_bytes = 0
        self.part_bytes = _COPIED_PART_BYTES
        """The most that one transfer is to have."""
        self.copies = False
        """Whether its transfers are over as soon as they are started, as far as is known."""

    @property
    def has_reads(self) -> bool:
        """Whether some are under way that somebody waits for."""
        return bool(self._fresh or self._reads)

    @property
    def has_work(self) -> bool:
        """Whether it is to be asked after."""
        return bool(self._fresh or self._reads or self._flights)

    def add(self, read: Read) -> None:
        """Takes a read on."""
        if self.failure:
            read.finish(self.failure)
        else:
            self._fresh.append(read)

    def read_now(self, read: Read) -> bool:
        """Does a read and says whether it is done; one that is not is given up, and taken on until it is over."""
        while not self.failure and (transfer := read.take()):
            self._start(read, transfer)
        done = read.is_complete and not self.failure
        if not done:
            read.abandon()
            self.add(read)
        return done

    def advance(self) -> bool:
        """Looks after what is under way and starts about a part of one read; says whether anything happened."""
        landed = self._land()
        return self._launch() or landed

    def give_up(self, failure: str) -> None:
        """Fails its reads. What is under way keeps its landing until it is over, however long that takes."""
        self.failure = self.failure or failure
        for reads in (self._fresh, self._reads):
            while reads:
                reads.popleft().finish(self.failure)
        self._leave()

    def forget(self, failure: str) -> None:
        """The agent is closed, so nothing is under way any more."""
        self._flights.clear()
        self.is_gone = True
        self.give_up(failure)

    def _land(self) -> bool:
        landed = False
        for handle, flight in list(self._flights.items()):
            try:
                if not self._agent.is_done(handle, peer=self.name):
                    if not self.failure and time.monotonic() > flight.deadline:
                        self.give_up(f"{self.name} has not been heard of for {READ_TIMEOUT_S:g} s")
                    continue
            except UnavailableError as exc:
                self.failure = self.failure or exc.message
            landed = True
            del self._flights[handle]
            self._flying_bytes -= flight.size_bytes
            flight.read.landed()
        if landed and self.failure:
            self.give_up(self.failure)
        return landed

    def _launch(self) -> bool:
        """Gives one read its turn. Fresh ones go first, up to a part: a small one waits for no more than that."""
        if self._fresh and (not self._reads or self._ahead_bytes < self.part_bytes):
            read = self._fresh.popleft()
            self._ahead_bytes += self._turn(read)
            if not self._finished(read):
                self._reads.append(read)
            return True
        self._ahead_bytes = 0
        for _ in range(len(self._reads)):
            read = self._reads.popleft()
            had_bytes = self._turn(read)
            finished = self._finished(read)
            if not finished:
                self._reads.append(read)
            if had_bytes or finished:
                return True
        return False

    def _turn(self, read: Read) -> int:
        """Starts transfers of a read, about a part in all; returns their bytes."""
        had_bytes = 0
        while had_bytes < self.part_bytes and self._flying_bytes < WINDOW_BYTES and not self.failure:
            transfer = read.take()
            if transfer is None:
                break
            self._start(read, transfer)
            had_bytes += transfer.size_bytes
        return had_bytes

    def _finished(self, read: Read) -> bool:
        """Whether nothing is left of a read, or of its peer; tells who waits."""
        if self.failure or read.is_complete:
            read.finish(self.failure)
            return True
        return False

    def _start(self, read: Read, transfer: Transfer) -> None:
        try:
            handle = self._agent.read(self.name, transfer)
        except UnavailableError as exc:
            read.landed()
            self.give_up(exc.message)
            return
        if handle is None:
            self.part_bytes, self.copies = _COPIED_PART_BYTES, True
            read.landed()
            return
        # The first read of a connection flies on one host too.
        self.part_bytes, self.copies = _FLYING_PART_BYTES, False
        self._flights[handle] = _Flight(read, transfer.size_bytes, time.monotonic() + READ_TIMEOUT_S)
        self._flying_bytes += transfer.size_bytes

    def _leave(self) -> None:
        if self.failure and not self._flights and not self.is_gone:
            self._agent.remove_peer(self.name)
            self.is_gone = True


def _wake(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
