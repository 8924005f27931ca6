"""Reads from the arenas of peers: the schedule of the transfers from one peer, and the thread that runs all reads.

A read consists of several transfers. Reads start transfers in turn. The thread sleeps while no transfer is in flight.
It must poll transfers, because the nixl library has no function that blocks until a transfer is complete. Polling
without pauses is fastest but uses a whole core. The thread therefore polls without pauses for a short time, and then
with growing pauses.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.process.host import lower_thread_priority
from stagemesh.connectors.base import Bytes

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent

_T = TypeVar("_T")


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
_SPIN_S = 50e-6
_PAUSES = Backoff(first_s=20e-6, longest_s=200e-6)
_ABANDONED_PAUSE_S = 0.05
"""The pause in seconds between polls while every transfer in flight belongs to an abandoned read."""
_STOP_TIMEOUT_S = 5.0
_CLOSED = "the nixl connector of this replica is closed"
_NO_MEMORY: Bytes = np.empty(0, np.uint8)

_log = logging.getLogger(__name__)


Descriptor: TypeAlias = tuple[int, int, int]
"""A memory range as the nixl library expects it: address, size in bytes, and device number."""


class Transfer(NamedTuple):
    """A transfer of several ranges. Each remote range is read into the local range with the same index."""

    local: list[Descriptor]
    remote: list[Descriptor]
    size_bytes: int


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
            # Releases the lock between peers, so that the event loop can acquire it.
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
