"""The thread that carries reads: it starts transfers, asks how they are, and sleeps when there are none.

Nothing in the nixl library waits, so somebody has to ask; asking again at once is quickest and burns a core. The pump
asks at once for a moment, then more and more seldom. What is small is carried on the event loop itself, where on one
host it is over before a thread would have woken up.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from stagemesh.connectors.connector import Bytes
from stagemesh.connectors.errors import StagemeshError, UnavailableError
from stagemesh.connectors.nixl.plan import Piece

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

READ_TIMEOUT_S = 3.0
"""For one transfer of at most `PART_BYTES`, from its start; a peer that lets it pass is given up."""
WINDOW_BYTES = 4 << 20
"""Bytes under way from one peer: enough to keep a fast wire busy, few enough that a small read is soon served."""
INLINE_BYTES = 1 << 20

_SPIN_S = 50e-6
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6
_SILENT_PAUSE_S = 0.05
_STOP_TIMEOUT_S = 5.0
_CLOSED = "the nixl connector of this replica is closed"


class Read:
    """One fetch under way. `landing` stays referred to, and its memory so reserved, until nothing writes to it."""

    def __init__(self, steps: Iterable[Iterable[list[Piece]]], *, landing: Bytes) -> None:
        self._landing = landing
        self._steps = deque(deque(parts) for parts in steps)
        self._flying = 0
        self._is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] | None = None
        self.is_finished = False
        self.failure = ""

    def take_part(self) -> list[Piece] | None:
        """The next transfer to start; None where there is none, or not before those under way are done."""
        if self._is_abandoned:
            self._steps.clear()
        if not self._steps or not self._steps[0]:
            return None
        self._flying += 1
        return self._steps[0].popleft()

    def part_done(self) -> None:
        """A transfer is over."""
        self._flying -= 1
        if not self._flying and self._steps and not self._steps[0]:
            self._steps.popleft()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be done."""
        return not self._steps and not self._flying

    def expect(self) -> None:
        """Makes `wait` possible; to be called before another thread can finish it."""
        self._over = self._loop.create_future()

    def finish(self, failure: str = "") -> None:
        """Tells who waits. In whatever thread, once."""
        self.is_finished, self.failure = True, failure
        if self._over is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, self._over)

    async def wait(self) -> None:
        """Returns when it is read. Raises UnavailableError."""
        if not self.is_finished:
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

    def advance(self) -> bool:
        """Looks after what is under way and starts one transfer at most; says whether anything happened."""
        now = time.monotonic()
        landed = self._land(now)
        return self._launch(now) or landed

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

    def _land(self, now: float) -> bool:
        landed = False
        for handle, flight in list(self._flights.items()):
            try:
                if not self._agent.is_done(handle, peer=self.name):
                    if now > flight.deadline and not self.failure:
                        self.give_up(f"{self.name} has not been heard of for {READ_TIMEOUT_S:g} s")
                    continue
            except UnavailableError as exc:
                self.failure = self.failure or exc.message
            landed = True
            del self._flights[handle]
            self._flying_bytes -= flight.size_bytes
            self._done(flight.read)
        if self.failure and landed:
            self.give_up(self.failure)
        return landed

    def _launch(self, now: float) -> bool:
        if self._flying_bytes >= WINDOW_BYTES:
            return False
        for _ in range(len(self._reads)):
            read = self._reads[0]
            self._reads.rotate(-1)
            part = read.take_part()
            if part is not None:
                self._start(read, part, now)
                return True
            if read.is_complete:
                # Given up by who waited.
                self._reads.remove(read)
                return True
        return False

    def _start(self, read: Read, part: list[Piece], now: float) -> None:
        size_bytes = sum(piece.size_bytes for piece in part)
        try:
            handle = self._agent.read(self.name, part)
        except UnavailableError as exc:
            read.part_done()
            self.give_up(exc.message)
            return
        if handle is None:
            self._done(read)
            return
        self._flights[handle] = _Flight(read, size_bytes, now + READ_TIMEOUT_S)
        self._flying_bytes += size_bytes

    def _done(self, read: Read) -> None:
        read.part_done()
        if self.failure or read.is_finished:
            return
        if read.is_complete:
            self._reads.remove(read)
            read.finish()

    def _leave(self) -> None:
        if self.failure and not self._flights and not self.is_gone:
            self._agent.remove_peer(self.name)
            self.is_gone = True


class Pump:
    """Carries reads for one agent. `close` ends the thread, and with the agent everything that is under way."""

    def __init__(self, make_agent: Callable[[], "Agent"]) -> None:
        self._make_agent = make_agent
        self._agent: Agent | None = None
        self._lock = threading.Lock()
        """Held by who uses the agent."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._peers: set[Peer] = set()
        self._is_closed = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="nixl-pump", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        """Makes the agent, where there is none yet. Raises NotReadyError."""
        await self._call(self._open)

    async def meet(self, name: str, metadata: bytes) -> Peer:
        """Gets to know a peer, which then lives until it fails or `part` is called. Raises NotReadyError."""
        return await self._call(lambda: self._add(name, metadata))

    async def part(self, peer: Peer) -> None:
        """Gives a peer up: its reads fail, and it is gone once the last of what is under way has come."""
        if not self._is_closed:
            await self._call(lambda: peer.give_up("it was closed"))

    def submit(self, peer: Peer, read: Read, *, size_bytes: int) -> None:
        """Carries a read, at once where it is small. On the event loop; `Read.wait` says when it is over."""
        if self._is_closed:
            read.finish(_CLOSED)
        elif size_bytes > INLINE_BYTES or peer.has_reads or not self._lock.acquire(blocking=False):
            read.expect()
            self._calls.put(lambda: self._take_on(peer, read))
        else:
            try:
                peer.add(read)
                while not read.is_finished and peer.advance():
                    pass
                if not read.is_finished:
                    read.expect()
                    self._calls.put(lambda: self._peers.add(peer))
            finally:
                self._lock.release()

    async def close(self) -> None:
        """Ends the thread and the agent. Closing twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(self._end)
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    async def _call(self, function: Callable[[], _T]) -> _T:
        if self._is_closed:
            raise UnavailableError(_CLOSED)
        outcome: Future[_T] = Future()

        def call() -> None:
            try:
                outcome.set_result(function())
            except StagemeshError as exc:
                outcome.set_exception(exc)

        self._calls.put(call)
        return await asyncio.shield(asyncio.wrap_future(outcome))

    # -- on the thread

    def _run(self) -> None:
        try:
            self._carry()
        except Exception:  # noqa: BLE001 - a thread's outermost edge
            _log.exception("the nixl connector stops: its thread failed")
            self._is_closed = True
            with self._lock:
                self._end()

    def _carry(self) -> None:
        pause_s: float | None = None
        busy_until = 0.0
        while not self._is_over:
            called = self._take_calls(pause_s)
            moved = self._advance()
            now = time.monotonic()
            if not self._peers:
                pause_s = None
            elif called or moved:
                pause_s, busy_until = 0.0, now + _SPIN_S
            elif now >= busy_until:
                pause_s = self._longer(pause_s or 0.0)

    def _take_calls(self, pause_s: float | None) -> bool:
        called = False
        try:
            call = self._calls.get(pause_s != 0, pause_s)
            while True:
                called = True
                with self._lock:
                    call()
                call = self._calls.get(block=False)
        except Empty:
            return called

    def _advance(self) -> bool:
        moved = False
        for peer in list(self._peers):
            # One by one, so that the event loop has its turn between them.
            with self._lock:
                moved = peer.advance() or moved
                if not peer.has_work:
                    self._peers.discard(peer)
        return moved

    def _longer(self, pause_s: float) -> float:
        if not any(peer.has_reads for peer in self._peers):
            # Nobody waits for what is left.
            return _SILENT_PAUSE_S
        return min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def _open(self) -> None:
        self._agent = self._agent or self._make_agent()

    def _add(self, name: str, metadata: bytes) -> Peer:
        if self._agent is None:
            raise UnavailableError(_CLOSED)
        self._agent.add_peer(name, metadata)
        return Peer(self._agent, name)

    def _take_on(self, peer: Peer, read: Read) -> None:
        if self._is_over:
            peer.give_up(_CLOSED)
        peer.add(read)
        self._peers.add(peer)

    def _end(self) -> None:
        self._is_over = True
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        while self._peers:
            self._peers.pop().forget(_CLOSED)


def _wake(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
