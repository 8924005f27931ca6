"""The thread that carries reads: it starts transfers, asks how they are, and sleeps when there are none.

Nothing in the nixl library waits, so somebody has to ask; asking again at once is quickest and burns a core. The pump
asks at once for a moment, then more and more seldom.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.connectors.nixl.remote_reads import Read, RemoteReads

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_SPIN_S = 50e-6
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6
_SILENT_PAUSE_S = 0.05
_STOP_TIMEOUT_S = 5.0
_CLOSED = "the nixl connector of this replica is closed"


class ReadThread:
    """Carries reads for one agent. `close` ends the thread, and with the agent everything that is under way."""

    def __init__(self, make_agent: Callable[[], "Agent"]) -> None:
        self._make_agent = make_agent
        self._agent: Agent | None = None
        self._lock = threading.Lock()
        """Held by who uses the agent."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._peers: set[RemoteReads] = set()
        self._is_closed = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="nixl-pump", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        """Makes the agent, where there is none yet. Raises NotReadyError."""
        await self._call(self._open)

    async def meet(self, name: str, metadata: bytes) -> RemoteReads:
        """Gets to know a peer, which then lives until it fails or `part` is called. Raises NotReadyError."""
        return await self._call(lambda: self._add(name, metadata))

    async def part(self, peer: RemoteReads) -> None:
        """Gives a peer up: its reads fail, and it is gone once the last of what is under way has come."""
        if not self._is_closed:
            await self._call(lambda: peer.give_up("it was closed"))

    def submit(self, peer: RemoteReads, read: Read) -> None:
        """Carries a read. On the event loop; `Read.wait` says when it is over."""
        if self._is_closed:
            read.finish(_CLOSED)
        else:
            read.expect()
            self._calls.put(lambda: self._take_on(peer, read))

    def read_at_once(self, peer: RemoteReads, read: Read) -> bool:
        """Carries a read on the event loop itself; False where it is not done then, and not waited for."""
        if self._is_closed or peer.has_reads or not self._lock.acquire(blocking=False):
            return False
        try:
            done = peer.read_now(read)
            if peer.has_work:
                self._calls.put(lambda: self._peers.add(peer))
        finally:
            self._lock.release()
        return done

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

    def _add(self, name: str, metadata: bytes) -> RemoteReads:
        if self._agent is None:
            raise UnavailableError(_CLOSED)
        self._agent.add_peer(name, metadata)
        return RemoteReads(self._agent, name)

    def _take_on(self, peer: RemoteReads, read: Read) -> None:
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
