"""The consuming end of a flow: order, exactly-once, credit, and the queue that the engine reads."""

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncIterator, Callable
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, number_of
from stagemesh.common.errors import (
    CancelledRequestError,
    InvalidChunkError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.notifier import Notifier
from stagemesh.connectors.arena.arena import MemoryAccount
from stagemesh.connectors.edge import EdgeKey, FlowStatus, Packet
from stagemesh.connectors.flow.reconnect_policy import NOT_READ, PEER_LOST
from stagemesh.connectors.stream import wire
from stagemesh.v1 import chunk_pb2, stage_pb2

LOST_PRODUCER_S = 15.0
"""How long a flow waits for its producer to connect again."""


MAX_RESYNCS = 3
"""How often a flow is opened again at the same place before its producer is taken for broken."""


class Session(Protocol):
    """The producer's stream, as its flows see it."""

    def touch(self, flow: "InletAttempt") -> None:
        """The flow has something to tell its producer (`report`)."""

    def reply(self, reply: stage_pb2.PutReply) -> None:
        """Sends a reply."""

    def forget(self, key: EdgeKey, *, moved: bool) -> None:
        """The flow is over, or goes on over another stream."""


@dataclass(eq=False, slots=True)
class Arrival:
    """A chunk that has come but whose bytes, or those of one before it, are on their way."""

    packet: Packet | None = None
    task: asyncio.Task[Packet] | None = None
    tail: Callable[[], None] | None = None
    size_bytes: int = 0

    @property
    def is_there(self) -> bool:
        """Whether `content` would give or raise something."""
        return self.task is None or self.task.done()

    def content(self) -> Packet:
        """The packet; raises what kept it from arriving."""
        if self.task is not None:
            return self.task.result()
        assert self.packet is not None, "an arrival has a packet, a task or a tail"
        return self.packet


class InletAttempt:
    """Implements `Inlet`. One consuming task iterates; the session calls the rest, all on one event loop."""

    def __init__(
        self,
        key: EdgeKey,
        *,
        producer: str,
        window_bytes: int,
        max_chunk_bytes: int,
        on_close: Callable[["InletAttempt"], None],
    ) -> None:
        self.key = key
        self.wire_key = wire.key_to_wire(key)
        self.producer = producer
        self.incarnation = ""
        self.connector: ConnectorName = GRPC
        self._window_bytes = window_bytes
        self._max_chunk_bytes = max_chunk_bytes
        self._on_close = on_close
        self._limit_bytes = self._told_limit_bytes = window_bytes
        self._received_bytes = self._consumed_bytes = 0
        self._demanded_bytes = 0
        self._next_seq = self._told_seq = 0
        self.landing_account = MemoryAccount()
        """What its chunks hold of the memory that they are fetched into."""
        self._arriving: deque[Arrival] = deque()
        self._queue: deque[Packet] = deque()
        self._digest = wire.FlowDigest()
        self._shape: wire.PacketShape | None = None
        self._ended = self._delivered_all = self._closed = self._discards = False
        self._error: StagemeshError | None = None
        self._session: Session | None = None
        self.resyncing = False
        self._resyncs = 0
        self._lost_timer: asyncio.TimerHandle | None = None
        self._changed = Notifier()

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

    @property
    def standing(self) -> FlowStatus:
        """See `Inlet`."""
        return FlowStatus(
            edge=self.key.edge,
            connector=self.connector if self.incarnation else AUTO,
            connected=self._session is not None,
            chunks=self._next_seq,
            waiting_chunks=len(self._queue),
            waiting_bytes=sum(packet.size_bytes for packet in self._queue),
            credit_bytes=self.credit_bytes,
            wanted_bytes=0,
            ended=self._ended,
        )

    async def aclose(self, *, lost: bool = False) -> None:
        """See `Inlet`."""
        edge = self.key.edge
        if lost:
            self._close(UnavailableError(f"the consumer of edge {edge} is gone", reason=PEER_LOST))
        else:
            self._close(CancelledRequestError(f"the consumer of edge {edge} stopped reading", reason=NOT_READ))

    def surrender(self, error: StagemeshError) -> list[Packet]:
        """Ends the flow, its producer and whoever reads it with `error`; returns what has arrived and was not read."""
        packets = list(self._queue)
        self._delivered_all = self._ended
        self._close(error)
        self._error = self._error or error
        self._changed.fire()
        return packets

    def discard(self) -> None:
        """Takes the flow to its end without a reader, and then closes by itself; nothing of it is needed."""
        self._discards = True
        self._await_producer()

    def _close(self, error: StagemeshError) -> None:
        """Lets go of everything; a producer that has yet something to send is told `error`."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._drop_arriving()
        if self._delivered_all:
            self._reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=self.wire_key)))
        elif self._error is None:
            self._reject(error)
        if self._session is not None:
            self._session.forget(self.key, moved=False)
            self._session = None
        self._cancel_timer()
        self._on_close(self)

    # -- the session's side

    @property
    def error(self) -> StagemeshError | None:
        """Why it goes on no more."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether all of it has arrived."""
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether all of it was read."""
        return self._delivered_all

    @property
    def next_seq(self) -> int:
        """All chunks below it have arrived."""
        return self._next_seq

    @property
    def credit_bytes(self) -> int:
        """What the producer may still send."""
        return max(0, self._limit_bytes - self._received_bytes)

    def open(
        self, session: Session, *, incarnation: str, connector: ConnectorName, opening: int = 0
    ) -> stage_pb2.EdgeOpened:
        """The producer opens the flow (again) on a stream, to go on from what has arrived."""
        if self._session is not None and self._session is not session:
            self._session.forget(self.key, moved=True)
        if self.resyncing or connector != self.connector:
            self.resyncing = False
            self._drop_arriving()
        self._session, self.incarnation, self.connector = session, incarnation, connector
        self._cancel_timer()
        self._told_seq, self._told_limit_bytes = self._next_seq, self._limit_bytes
        return stage_pb2.EdgeOpened(
            key=self.wire_key,
            next_seq=self._next_seq,
            credit_limit_bytes=self._limit_bytes,
            connector=number_of(connector),
            opening=opening,
        )

    def detach(self, session: Session) -> None:
        """The producer's stream is gone; it has LOST_PRODUCER_S to come back."""
        if self._session is session:
            self._session = None
            self._await_producer()

    def resync(self, error: StagemeshError, *, failed: ConnectorName | None = None) -> None:
        """Something of the flow was lost: has it opened again, and ignores what comes before that.

        A producer that does no better after MAX_RESYNCS is refused with `error`.
        """
        if self.resyncing or self._error is not None or self._ended:
            return
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            self.refuse(error)
            return
        self.resyncing = True
        resync = stage_pb2.EdgeResync(key=self.wire_key, error=wire.error_to_wire(error))
        if failed is not None:
            resync.failed = number_of(failed)
        self._reply(stage_pb2.PutReply(resync=resync))
        self._await_producer()

    def report(self, response: stage_pb2.PutChunkResponse) -> None:
        """Adds what the producer has not been told yet."""
        if self._next_seq > self._told_seq:
            ack = response.replies.add().ack
            ack.key.CopyFrom(self.wire_key)
            ack.next_seq = self._told_seq = self._next_seq
            if self._limit_bytes > self._told_limit_bytes:
                ack.credit_limit_bytes = self._told_limit_bytes = self._limit_bytes
        elif self._limit_bytes > self._told_limit_bytes:
            credit = response.replies.add().credit
            credit.key.CopyFrom(self.wire_key)
            credit.limit_bytes = self._told_limit_bytes = self._limit_bytes

    def lost_error(self) -> UnavailableError:
        """What a reader gets when the producer does not come back."""
        return UnavailableError(
            f"replica {self.producer} went away before chunk {self._next_seq} of edge {self.key.edge}",
            reason="PRODUCER_LOST",
            metadata={"edge": self.key.edge, "replica": self.producer, "seq": str(self._next_seq)},
        )

    def fail(self, error: StagemeshError) -> None:
        """Ends the reader after what it has in its queue."""
        if self._error is None and not self._ended:
            self._error = error
            self._changed.fire()
            if self._discards:
                self._close(error)

    def refuse(self, error: StagemeshError) -> None:
        """The flow is broken by its producer: tells both sides."""
        self._reject(error)
        self.fail(error)

    def check_room(self, size_bytes: int) -> None:
        """Raises InvalidChunkError when that many bytes more exceed the credit."""
        if size_bytes > self.credit_bytes:
            raise InvalidChunkError(
                f"chunk {self._next_seq} of edge {self.key.edge} brings {size_bytes} bytes "
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
        """Whether `seq` is due; False for one that came before. Raises InvalidChunkError for a gap."""
        due = self._next_seq + len(self._arriving)
        if seq > due or (self._ended and seq == due):
            raise InvalidChunkError(
                f"chunk {seq} of edge {self.key.edge} came where {due} was due", reason="SEQUENCE_GAP"
            )
        return seq == due

    def deliver(self, packet: Packet) -> None:
        """Takes the next data chunk, checked and within credit."""
        self._received_bytes += packet.size_bytes
        if self._arriving:
            self._arriving.append(Arrival(packet=packet, size_bytes=packet.size_bytes))
        else:
            self._take(packet)

    def deliver_later(self, task: asyncio.Task[Packet], *, size_bytes: int) -> None:
        """Takes the next data chunk, whose bytes are on their way; what comes after it waits for it."""
        self._received_bytes += size_bytes
        self._arriving.append(Arrival(task=task, size_bytes=size_bytes))
        task.add_done_callback(lambda _: self._land())

    def deliver_end(self, end: chunk_pb2.ChunkEnd) -> None:
        """Takes the End; raises InvalidChunkError where it tells of other chunks than came."""
        if self._arriving:
            self._arriving.append(Arrival(tail=lambda: self._take_end(end)))
        else:
            self._take_end(end)

    def deliver_abort(self, error: StagemeshError) -> None:
        """Takes the Abort."""
        located = error.located(edge=self.key.edge, replica=self.producer)
        if self._arriving:
            self._arriving.append(Arrival(tail=lambda: self._take_abort(located)))
        else:
            self._take_abort(located)

    # -- inner workings

    def _take(self, packet: Packet) -> None:
        self._shape = shape = wire.shape_of(packet, last=self._shape)
        self._digest.add(shape)
        if self._discards:
            self._consumed(packet.size_bytes)
        elif not self._closed and self._error is None:
            self._queue.append(packet)
        self._advance()

    def _take_end(self, end: chunk_pb2.ChunkEnd) -> None:
        mine = self._digest.end()
        if end.count != mine.count or not hmac.compare_digest(end.digest, mine.digest):
            raise InvalidChunkError(
                f"edge {self.key.edge} ended after {end.count} chunks where {mine.count} came, or they differ",
                reason="DIGEST_MISMATCH",
            )
        self._ended = True
        self._advance()
        if self._discards:
            self._delivered_all = True
            self._close(self.lost_error())

    def _take_abort(self, error: StagemeshError) -> None:
        self.fail(error)
        self._advance()

    def _land(self) -> None:
        """Takes what has arrived, in order; what could not be read has the flow opened again by another way."""
        while self._arriving and self._arriving[0].is_there:
            arrival = self._arriving.popleft()
            try:
                if arrival.tail is not None:
                    arrival.tail()
                else:
                    self._take(arrival.content())
            except UnavailableError as exc:
                self._arriving.appendleft(arrival)
                self.resync(exc, failed=self.connector)
                return
            except StagemeshError as exc:
                self.refuse(exc)
                return

    def _drop_arriving(self) -> None:
        """Gives up what is on its way; it comes again."""
        while self._arriving:
            arrival = self._arriving.pop()
            self._received_bytes -= arrival.size_bytes
            if arrival.task is not None:
                arrival.task.cancel()

    def _advance(self) -> None:
        self._next_seq += 1
        self._resyncs = 0
        # The engine first: the acknowledgement is in no hurry.
        self._changed.fire()
        if self._session is not None:
            self._session.touch(self)

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
            if self._session is not None:
                self._session.touch(self)

    def _reject(self, error: StagemeshError) -> None:
        rejected = stage_pb2.EdgeRejected(key=self.wire_key, error=wire.error_to_wire(error))
        self._reply(stage_pb2.PutReply(rejected=rejected))

    def _reply(self, reply: stage_pb2.PutReply) -> None:
        if self._session is not None:
            self._session.reply(reply)

    def _await_producer(self) -> None:
        if not self._ended and self._error is None and not self._closed and self._lost_timer is None:
            loop = asyncio.get_running_loop()
            self._lost_timer = loop.call_later(LOST_PRODUCER_S, self.fail, self.lost_error())

    def _cancel_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
