"""The consuming end of a flow: order, exactly-once, credit, and the queue that the engine reads."""

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncIterator, Callable
from copy import copy
from typing import Protocol

from stagemesh.connectors import wire
from stagemesh.connectors.base import EdgeKey, Packet
from stagemesh.connectors.errors import (
    CancelledRequestError,
    InvalidChunkError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.connectors.pulse import Pulse
from stagemesh.v1 import chunk_pb2, stage_pb2

LOST_PRODUCER_S = 3.0
"""How long a flow waits for its producer to connect again."""


class ReplySink(Protocol):
    """The way back to the producer."""

    def reply(self, reply: stage_pb2.PutReply) -> None:
        """Sends a reply."""

    def forget(self, key: EdgeKey) -> None:
        """The flow is over."""


class InFlow:
    """Implements `Inlet`. One consuming task iterates; the session calls the rest, all on one event loop."""

    def __init__(
        self,
        key: EdgeKey,
        *,
        producer: str,
        window_bytes: int,
        max_chunk_bytes: int,
        on_close: Callable[["InFlow"], None],
    ) -> None:
        self.key = key
        self.producer = producer
        self.next_seq = 0
        self._window_bytes = window_bytes
        self._max_chunk_bytes = max_chunk_bytes
        self._on_close = on_close
        self._limit_bytes = window_bytes
        self._received_bytes = self._consumed_bytes = 0
        self._demanded_bytes = 0
        self._queue: deque[Packet] = deque()
        self._digest = wire.FlowDigest()
        self._ended = self._delivered_all = self._closed = False
        self._error: StagemeshError | None = None
        self._session: ReplySink | None = None
        self._lost_timer: asyncio.TimerHandle | None = None
        self._changed = Pulse()

    # -- the engine's side

    def __aiter__(self) -> AsyncIterator[Packet]:
        """See `Inlet`."""
        return self

    async def __anext__(self) -> Packet:
        """The next packet; not a generator, whose frame would hold on to the last one and so to its lease."""
        while not self._queue:
            if self._error is not None:
                # A copy: what is raised holds on to frames, and they to packets and their leases.
                raise copy(self._error)
            if self._ended:
                self._delivered_all = True
                raise StopAsyncIteration
            await self._changed.wait()
        packet = self._queue.popleft()
        self._consumed(packet.size_bytes)
        return packet

    async def aclose(self) -> None:
        """See `Inlet`."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        if self._delivered_all:
            self._reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=wire.key_to_wire(self.key))))
        elif self._error is None:
            self._reject(CancelledRequestError(f"the consumer of edge {self.key.edge} stopped reading"))
        if self._session is not None:
            self._session.forget(self.key)
            self._session = None
        self._cancel_timer()
        self._on_close(self)

    # -- the session's side

    @property
    def complete(self) -> bool:
        """Whether all of it was read."""
        return self._delivered_all

    @property
    def credit_bytes(self) -> int:
        """What the producer may still send."""
        return max(0, self._limit_bytes - self._received_bytes)

    @property
    def limit_bytes(self) -> int:
        """What the producer may send in all."""
        return self._limit_bytes

    def attach(self, session: ReplySink) -> None:
        """The producer has a stream (again)."""
        self._session = session
        self._cancel_timer()

    def detach(self, session: ReplySink) -> None:
        """The producer's stream is gone; it has LOST_PRODUCER_S to come back."""
        if self._session is not session:
            return
        self._session = None
        if not self._ended and self._error is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._lost_timer = loop.call_later(LOST_PRODUCER_S, self.fail, self.lost_error())

    def lost_error(self) -> UnavailableError:
        """What a reader gets when the producer does not come back."""
        return UnavailableError(
            f"replica {self.producer} went away before chunk {self.next_seq} of edge {self.key.edge}",
            reason="PRODUCER_LOST",
            metadata={"edge": self.key.edge, "replica": self.producer, "seq": str(self.next_seq)},
        )

    def fail(self, error: StagemeshError) -> None:
        """Ends the reader after what it has in its queue."""
        if self._error is None and not self._ended:
            self._error = error
            self._changed.fire()

    def refuse(self, error: StagemeshError) -> None:
        """The flow is broken by its producer: tells both sides."""
        self.fail(error)
        self._reject(error)

    def check_room(self, size_bytes: int) -> None:
        """Raises InvalidChunkError when that many bytes more exceed the credit."""
        if size_bytes > self.credit_bytes:
            raise InvalidChunkError(
                f"chunk {self.next_seq} of edge {self.key.edge} brings {size_bytes} bytes "
                f"where {self.credit_bytes} were granted",
                reason="CREDIT_EXCEEDED",
            )

    def demand(self, size_bytes: int) -> None:
        """The producer has a chunk larger than the window."""
        if size_bytes > self._max_chunk_bytes:
            self.refuse(
                InvalidChunkError(
                    f"a chunk of {size_bytes} bytes on edge {self.key.edge} exceeds the consumer's limit of "
                    f"{self._max_chunk_bytes}; cut it with `chunk: {{frames: N}}` or raise data_plane.arena_bytes",
                    reason="CHUNK_TOO_LARGE",
                )
            )
            return
        self._demanded_bytes = size_bytes
        self._meet_demand()

    def check_seq(self, seq: int) -> bool:
        """Whether `seq` is the next one; False for one that came before, InvalidChunkError for a gap."""
        if seq > self.next_seq or self._ended:
            raise InvalidChunkError(
                f"chunk {seq} of edge {self.key.edge} came where {self.next_seq} was due", reason="SEQUENCE_GAP"
            )
        return seq == self.next_seq

    def deliver(self, packet: Packet) -> None:
        """Takes the next data chunk, checked and within credit."""
        self._received_bytes += packet.size_bytes
        self._digest.add(packet)
        if not self._closed and self._error is None:
            self._queue.append(packet)
        self._advance()

    def deliver_end(self, end: chunk_pb2.ChunkEnd) -> None:
        """Takes the End; raises InvalidChunkError where it tells of other chunks than came."""
        mine = self._digest.end()
        if end.count != mine.count or not hmac.compare_digest(end.digest, mine.digest):
            raise InvalidChunkError(
                f"edge {self.key.edge} ended after {end.count} chunks where {mine.count} came, or they differ",
                reason="DIGEST_MISMATCH",
            )
        self._ended = True
        self._advance()

    def deliver_abort(self, error: StagemeshError) -> None:
        """Takes the Abort."""
        self.fail(error.located(edge=self.key.edge, replica=self.producer))
        self._advance()

    # -- inner workings

    def _advance(self) -> None:
        self.next_seq += 1
        ack = stage_pb2.ChunkAck(key=wire.key_to_wire(self.key), next_seq=self.next_seq)
        self._reply(stage_pb2.PutReply(ack=ack))
        self._changed.fire()

    def _consumed(self, size_bytes: int) -> None:
        self._consumed_bytes += size_bytes
        limit = self._consumed_bytes + self._window_bytes
        if limit - self._limit_bytes >= self._window_bytes // 4:
            self._grant(limit)
        self._meet_demand()

    def _meet_demand(self) -> None:
        if self._demanded_bytes and self._consumed_bytes == self._received_bytes:
            self._grant(self._received_bytes + self._demanded_bytes)
            self._demanded_bytes = 0

    def _grant(self, limit_bytes: int) -> None:
        if limit_bytes > self._limit_bytes:
            self._limit_bytes = limit_bytes
            credit = stage_pb2.CreditGrant(key=wire.key_to_wire(self.key), limit_bytes=limit_bytes)
            self._reply(stage_pb2.PutReply(credit=credit))

    def _reject(self, error: StagemeshError) -> None:
        rejected = stage_pb2.EdgeRejected(key=wire.key_to_wire(self.key), error=wire.error_to_wire(error))
        self._reply(stage_pb2.PutReply(rejected=rejected))

    def _reply(self, reply: stage_pb2.PutReply) -> None:
        if self._session is not None:
            self._session.reply(reply)

    def _cancel_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
