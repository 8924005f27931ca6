"""Flow control: the credit of a producer, and the queue of the flows that are ready to send."""

import asyncio
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

WINDOW_CHUNKS = 4096
"""The number of unread chunks that a producer may send. Their descriptions take memory in addition to their bytes."""

_Flow = TypeVar("_Flow")


class ReadyQueue(Generic[_Flow]):
    """The flows or calls of one stream that have messages to send, in the order in which they became ready.

    Flows add themselves to the queue. The callback `pull` removes flows from the queue and sends their messages. The
    event loop calls `pull` at most once in each iteration.
    """

    def __init__(self, pull: Callable[[], None]) -> None:
        self._pull = pull
        self._flows: dict[_Flow, None] = {}
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def __contains__(self, flow: _Flow) -> bool:
        """Returns whether the flow is in the queue."""
        return flow in self._flows

    def add(self, flow: _Flow) -> None:
        """Schedules `pull`, and appends the flow unless the queue already contains it."""
        self._flows[flow] = None
        self.wake()

    def wake(self) -> None:
        """Schedules a call of `pull` in the next iteration of the event loop, unless a call is already scheduled."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def discard(self, flow: _Flow) -> None:
        """Removes a flow from the queue. Does nothing if the flow is not in the queue."""
        self._flows.pop(flow, None)

    def first(self) -> _Flow | None:
        """Returns the first flow without removing it, or None if the queue is empty."""
        return next(iter(self._flows), None)

    def rotate(self, flow: _Flow) -> None:
        """Moves a flow to the end of the queue. Adds the flow if it is not in the queue."""
        self._flows.pop(flow, None)
        self._flows[flow] = None

    def take_all(self) -> list[_Flow]:
        """Removes all flows from the queue and returns them in order."""
        flows = list(self._flows)
        self._flows.clear()
        return flows

    def _run(self) -> None:
        self._is_scheduled = False
        self._pull()


class CreditLimit(NamedTuple):
    """How much a producer may send, counted from the flow's first chunk."""

    size_bytes: int
    """The payload bytes of data chunks."""
    chunks: int
    """The number of data chunks."""


class Credit:
    """The number of payload bytes and of chunks that one producer may send.

    The limits are cumulative: they include everything since the flow's first chunk.
    """

    def __init__(self, window_bytes: int, *, max_chunk_bytes: int) -> None:
        """Grants an initial credit of `window_bytes` bytes.

        A chunk that is larger than both `max_chunk_bytes` and `window_bytes` never receives credit.
        """
        self.max_chunk_bytes = max(max_chunk_bytes, window_bytes)
        self.limit_bytes = self.window_bytes = self._reported_bytes = window_bytes
        self.received_bytes = self._consumed_bytes = self._demanded_bytes = 0
        self.limit_chunks = self._reported_chunks = WINDOW_CHUNKS
        self._consumed_chunks = 0

    @property
    def available_bytes(self) -> int:
        """The remaining credit in payload bytes."""
        return max(0, self.limit_bytes - self.received_bytes)

    def consume(self, size_bytes: int) -> bool:
        """Counts a chunk of `size_bytes` bytes as read. Returns whether a credit limit has risen.

        The limits rise in steps of at least a quarter of the credit window, so a chunk of at most half the window
        receives credit when all received bytes have been read. If a demand is pending at that time, the limit rises
        far enough for the demanded chunk.
        """
        self._consumed_bytes += size_bytes
        self._consumed_chunks += 1
        is_raised = self._consumed_chunks + WINDOW_CHUNKS - self.limit_chunks >= WINDOW_CHUNKS // 4
        if is_raised:
            self.limit_chunks = self._consumed_chunks + WINDOW_CHUNKS
        return self._raise_bytes() or is_raised

    def _raise_bytes(self) -> bool:
        limit_bytes, step_bytes = self._consumed_bytes + self.window_bytes, max(1, self.window_bytes // 4)
        if self._demanded_bytes and self._consumed_bytes == self.received_bytes:
            limit_bytes, step_bytes = max(limit_bytes, self.received_bytes + self._demanded_bytes), 1
            self._demanded_bytes = 0
        is_raised = limit_bytes - self.limit_bytes >= step_bytes
        if is_raised:
            self.limit_bytes = limit_bytes
        return is_raised

    def demand(self, size_bytes: int) -> bool:
        """Requests credit for a chunk of `size_bytes` bytes. Returns True if the credit was granted immediately.

        Otherwise, the credit is granted when all received bytes have been read.
        """
        self._demanded_bytes = size_bytes
        return self._raise_bytes()

    def report(self) -> tuple[int | None, int | None]:
        """Returns the credit limits in bytes and in chunks, each None if it has not risen since the last call."""
        size_bytes = self.limit_bytes if self.limit_bytes > self._reported_bytes else None
        chunks = self.limit_chunks if self.limit_chunks > self._reported_chunks else None
        self._reported_bytes, self._reported_chunks = self.limit_bytes, self.limit_chunks
        return size_bytes, chunks
