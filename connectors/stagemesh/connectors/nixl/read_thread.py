"""The thread that runs the reads from all peers.

The thread sleeps while no transfer is in flight. It must poll transfers, because the nixl library has no function that
blocks until a transfer is complete. Polling without pauses is fastest but uses a whole core. The thread therefore polls
without pauses for a short time, and then with growing pauses.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.process.host import lower_thread_priority
from stagemesh.connectors.nixl.reads import Read, RemoteReads

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

_T = TypeVar("_T")

_SPIN_S = 50e-6
_PAUSES = Backoff(first_s=20e-6, longest_s=200e-6)
_ABANDONED_PAUSE_S = 0.05
"""The pause in seconds between polls while every transfer in flight belongs to an abandoned read."""
_STOP_TIMEOUT_S = 5.0
_CLOSED = "the nixl connector of this replica is closed"

_log = logging.getLogger(__name__)


class ReadThread:
    """Runs the reads of one agent in a thread. `close` ends the thread, the agent and all transfers in flight."""

    def __init__(self, make_agent: Callable[[], "Agent"]) -> None:
        self._make_agent = make_agent
        self._agent: Agent | None = None
        self._lock = threading.Lock()
        """The lock that a thread must hold while it uses the agent."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._peers: set[RemoteReads] = set()
        """The peers with unfinished reads or with transfers in flight."""
        self._is_closed = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="nixl-reads", daemon=True)
        self._thread.start()

    async def connect(self, name: str, metadata: bytes) -> RemoteReads:
        """Connects to a peer and returns the object that schedules the reads from this peer.

        `name` and `metadata` belong to the peer's serving agent. The first call creates this replica's agent. The
        connection lasts until the peer fails or `disconnect` is called. Raises NotReadyError if the library cannot be
        used, the peer's metadata is invalid, or the peer is unreachable.
        """
        return await self._call(lambda: self._add_peer(name, metadata))

    async def disconnect(self, peer: RemoteReads) -> None:
        """Fails all reads from a peer. The agent removes the peer when the last transfer from this peer has ended."""
        if not self._is_closed:
            await self._call(lambda: peer.fail("it was closed"))

    async def run(self, peer: RemoteReads, read: Read) -> None:
        """Runs a read on the thread and waits until the read is complete. Raises UnavailableError if the read fails."""
        if self._is_closed:
            raise UnavailableError(_CLOSED, reason="CONNECTOR_FAILED")
        read.completion = completion = asyncio.get_running_loop().create_future()
        self._calls.put(lambda: self._add_read(peer, read))
        try:
            await completion
        except asyncio.CancelledError:
            read.abandon()
            raise
        if read.failure:
            raise UnavailableError(read.failure, reason="CONNECTOR_FAILED")

    def read_at_once(self, peer: RemoteReads, read: Read) -> bool:
        """Runs a read on the event loop, without the read thread. Returns whether the read is complete.

        An incomplete read is abandoned. Does nothing and returns False if the read thread is using the agent or if the
        peer has other reads.
        """
        if self._is_closed or peer.has_reads or not self._lock.acquire(blocking=False):
            return False
        try:
            is_complete = peer.read_at_once(read)
            if peer.has_work:
                self._calls.put(lambda: self._peers.add(peer))
        finally:
            self._lock.release()
        return is_complete

    async def close(self) -> None:
        """Closes the agent and ends the thread. Waits at most _STOP_TIMEOUT_S seconds for the thread. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(self._end)
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    async def _call(self, function: Callable[[], _T]) -> _T:
        if self._is_closed:
            raise UnavailableError(_CLOSED, reason="CONNECTOR_FAILED")
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
            lower_thread_priority()
            self._serve()
        except Exception:  # noqa: BLE001 - the outermost code of a thread
            _log.exception("the nixl connector stops, because its thread has failed")
            self._is_closed = True
            with self._lock:
                self._end()

    def _serve(self) -> None:
        pauses = _PAUSES.retries()
        pause_s: float | None = None
        spin_until = 0.0
        while not self._has_ended:
            was_called = self._run_calls(pause_s)
            has_advanced = self._advance()
            now = time.monotonic()
            if not self._peers:
                pause_s = None
            elif was_called or has_advanced:
                pauses.reset()
                pause_s, spin_until = 0.0, now + _SPIN_S
            elif now >= spin_until:
                is_awaited = any(peer.has_reads for peer in self._peers)
                pause_s = pauses.next_s() if is_awaited else _ABANDONED_PAUSE_S

    def _run_calls(self, pause_s: float | None) -> bool:
        """Runs all queued calls. Returns whether at least one call was queued.

        Waits at most `pause_s` seconds for the first call, or without a time limit if `pause_s` is None.
        """
        was_called = False
        try:
            call = self._calls.get(pause_s != 0, pause_s)
            while True:
                was_called = True
                with self._lock:
                    call()
                call = self._calls.get(block=False)
        except Empty:
            return was_called

    def _advance(self) -> bool:
        has_advanced = False
        for peer in list(self._peers):
            # Releases the lock between peers so that the event loop can acquire it.
            with self._lock:
                has_advanced = peer.advance() or has_advanced
                if not peer.has_work:
                    self._peers.discard(peer)
        return has_advanced

    def _add_peer(self, name: str, metadata: bytes) -> RemoteReads:
        if self._has_ended:
            raise UnavailableError(_CLOSED, reason="CONNECTOR_FAILED")
        if self._agent is None:
            self._agent = self._make_agent()
        self._agent.add_peer(name, metadata)
        return RemoteReads(self._agent, name)

    def _add_read(self, peer: RemoteReads, read: Read) -> None:
        if self._has_ended:
            peer.fail(_CLOSED)
        peer.add(read)
        self._peers.add(peer)

    def _end(self) -> None:
        self._has_ended = True
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        while self._peers:
            self._peers.pop().discard(_CLOSED)
