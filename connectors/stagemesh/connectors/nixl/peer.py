"""What is read from one peer: reads that take turns, and the transfers of theirs that are under way."""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stagemesh.connectors.connector import Bytes
from stagemesh.connectors.errors import UnavailableError
from stagemesh.connectors.nixl.plan import Transfer

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

READ_TIMEOUT_S = 3.0
"""For one transfer, from its start; a peer that lets it pass is given up."""
WINDOW_BYTES = 4 << 20
"""Bytes under way from one peer: enough to keep a fast wire busy, few enough that a small read is soon served."""
_FLYING_PART_BYTES = WINDOW_BYTES // 4
_COPIED_PART_BYTES = 4 << 20
"""Of a transfer that is a copy on one host and blocks while it lasts: others wait for one part, about a millisecond."""


class Read:
    """One fetch: transfers of data, and some that may start only when those are done.

    `landing` stays referred to, and its memory so reserved, until nothing writes to it.
    """

    __slots__ = (
        "_data",
        "_flying",
        "_is_abandoned",
        "_landing",
        "_over",
        "_started",
        "_transfers",
        "failure",
        "is_over",
    )

    def __init__(self, data: list[Transfer], then: list[Transfer], *, landing: Bytes) -> None:
        self._transfers = data + then
        self._data = len(data)
        self._started = 0
        self._flying = 0
        self._landing = landing
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
                self._is_abandoned = True
                raise
        if self.failure:
            raise UnavailableError(self.failure)


class _Flight(NamedTuple):
    read: Read
    size_bytes: int
    deadline: float


class Peer:
    """A serving agent that is read from. All methods are the pump's, under its lock."""

    def __init__(self, agent: "Agent", name: str) -> None:
        self._agent = agent
        self.name = name
        self.failure = ""
        """Why it is not read from any more; empty while it is."""
        self.is_gone = False
        """Whether nothing of it is left, so that it may be met again."""
        self._reads: deque[Read] = deque()
        self._flights: dict[int, _Flight] = {}
        self._flying_bytes = 0
        self.part_bytes = _COPIED_PART_BYTES
        """The most that one transfer is to have."""

    @property
    def has_reads(self) -> bool:
        """Whether some are under way that somebody waits for."""
        return bool(self._reads)

    @property
    def has_work(self) -> bool:
        """Whether it is to be asked after."""
        return bool(self._reads or self._flights)

    def add(self, read: Read) -> None:
        """Takes a read on."""
        if self.failure:
            read.finish(self.failure)
        else:
            self._reads.append(read)

    def read_now(self, read: Read) -> None:
        """Does what can be done without waiting; what is not over then is taken on."""
        while not self.failure and (transfer := read.take()):
            self._start(read, transfer)
        if read.is_complete and not self.failure:
            read.is_over = True
        else:
            self.add(read)

    def advance(self) -> bool:
        """Looks after what is under way and starts one transfer at most; says whether anything happened."""
        landed = self._land()
        return self._launch() or landed

    def give_up(self, failure: str) -> None:
        """Fails its reads. What is under way keeps its landing until it is over, however long that takes."""
        self.failure = self.failure or failure
        while self._reads:
            self._reads.popleft().finish(self.failure)
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
        """Goes round the reads, so that a large one does not hold up those behind it."""
        for _ in range(len(self._reads)):
            read = self._reads[0]
            if read.is_complete:
                self._reads.popleft().finish()
                return True
            self._reads.rotate(-1)
            transfer = read.take() if self._flying_bytes < WINDOW_BYTES else None
            if transfer:
                self._start(read, transfer)
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
            self.part_bytes = _COPIED_PART_BYTES
            read.landed()
            return
        # The first read of a connection flies on one host too.
        self.part_bytes = _FLYING_PART_BYTES
        self._flights[handle] = _Flight(read, transfer.size_bytes, time.monotonic() + READ_TIMEOUT_S)
        self._flying_bytes += transfer.size_bytes

    def _leave(self) -> None:
        if self.failure and not self._flights and not self.is_gone:
            self._agent.remove_peer(self.name)
            self.is_gone = True


def _wake(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
