"""The consuming end of a flow: a series of attempts, whose packets an engine reads each once and in order."""

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from copy import copy
from enum import Enum, auto
from typing import NamedTuple

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, number_of
from stagemesh.common.errors import CancelledRequestError, InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.connectors.arena.arena import MemoryAccount
from stagemesh.connectors.edge import NOT_READ, PEER_LOST, EdgeKey, FlowStatus, Packet, ReadyQueue, is_recoverable
from stagemesh.connectors.flow.packet_queue import Credit, PacketQueue
from stagemesh.connectors.stream import wire
from stagemesh.v1 import chunk_pb2, stage_pb2

LOST_PRODUCER_S = 15.0
"""How long a flow waits for its producer to connect again."""
MAX_RESYNCS = 3
"""How often a flow is opened again at the same chunk before its producer is rejected as broken."""


class Phase(Enum):
    """The state of an attempt."""

    WAITING = auto()
    """No stream carries the attempt; the producer is expected to open it."""
    OPEN = auto()
    """Chunks are accepted."""
    RESYNCING = auto()
    """A message was lost; everything is ignored until the producer opens the attempt again."""
    ENDED = auto()
    """Every chunk and End have arrived."""
    FAILED = auto()
    """An error ended the flow; the reader receives it after the packets that have arrived."""
    CLOSED = auto()
    """The reader has closed the inlet, or a successor took the attempt's place."""


class Inlet:
    """The consuming end of a flow, iterated over by one task. Its packets are in order, each once, up to End.

    If the producer is lost, another one may take its place within `rebind_s`. The new flow
    continues after the rows that have arrived: it drops rows that arrived before.
    """

    def __init__(self, attempt: "InletAttempt", *, rebind_s: float = 0.0) -> None:
        self.attempt = attempt
        self._rebind_s = rebind_s
        self._packets = attempt.packets

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns itself: a flow is read once."""
        return self

    async def __anext__(self) -> Packet:
        """Returns the next packet. Raises the error of an Abort or of a lost producer."""
        # Not a generator, whose frame would retain the last packet and so its lease.
        packets = self._packets
        while not packets.waiting:
            attempt = self.attempt
            if packets.has_ended:
                if attempt.phase is Phase.ENDED:
                    attempt.is_read = True
                raise StopAsyncIteration
            if attempt.error is None:
                await packets.changed.wait()
            else:
                await self._wait_for_successor(attempt, attempt.error)
        return packets.pop()

    @property
    def status(self) -> FlowStatus:
        """The present state."""
        attempt, packets = self.attempt, self._packets
        return FlowStatus(
            edge=attempt.key.edge,
            connector=attempt.connector if attempt.incarnation else AUTO,
            connected=attempt.is_connected,
            chunks=attempt.next_seq,
            waiting_chunks=packets.waiting,
            waiting_bytes=packets.waiting_bytes,
            credit_bytes=attempt.credit_bytes,
            wanted_bytes=0,
            ended=packets.has_ended,
        )

    @property
    def is_lost(self) -> bool:
        """Whether the present attempt has failed."""
        return self.attempt.error is not None

    async def aclose(self, *, lost: bool = False) -> None:
        """Rejects further packets and releases those that have arrived. Closing twice is harmless.

        Args:
            lost: Tells the producer that this consumer is lost, so that another consumer may be bound.
        """
        self._packets.clear()
        if self.attempt.is_discarding:
            # It commits and closes when it has arrived completely.
            return
        edge = self.attempt.key.edge
        if lost:
            error: StagemeshError = UnavailableError(f"the consumer of edge {edge} has ended", reason=PEER_LOST)
        else:
            error = CancelledRequestError(f"the consumer of edge {edge} stopped reading", reason=NOT_READ)
        self.attempt.close(error)

    def check_rebindable(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) if a flow that begins at `first_rows` would leave rows out."""
        if not self._packets.has_ended:
            self._packets.rows.check(first_rows)

    def rebind(self, attempt: "InletAttempt", *, first_rows: Mapping[str, int]) -> None:
        """Continues with another producer, whose flow begins at `first_rows`. Call `check_rebindable` first.

        The former attempt must be superseded. Packets that have arrived are still to be read.
        """
        self.attempt = attempt
        if self._packets.has_ended:
            # Everything has arrived. The new producer must reach its end nevertheless.
            attempt.discard()
        else:
            self._packets.rows.begin(first_rows)
        self._packets.changed.fire()

    async def _wait_for_successor(self, attempt: "InletAttempt", error: StagemeshError) -> None:
        """Returns when another attempt has taken the place of `attempt`; raises its error if none does."""
        # A copy, because a raised error refers to frames, and they refer to packets and their leases.
        if not self._rebind_s or not is_recoverable(error):
            raise copy(error)
        try:
            async with asyncio.timeout(self._rebind_s):
                while self.attempt is attempt:
                    await self._packets.changed.wait()
        except TimeoutError:
            raise copy(error) from None


class _Arrival(NamedTuple):
    """A chunk that cannot be accepted yet, because its bytes or those of an earlier chunk are under way."""

    size_bytes: int
    accept: Callable[[], None]
    """Accepts the chunk; raises the error of a failed transfer."""
    transfer: asyncio.Task[Packet] | None = None


class InletAttempt:
    """Receives an inlet's chunks from one producer: order, exactly-once delivery, and credit.

    The session passes it the producer's messages, and pulls from it what the producer must be sent.
    """

    def __init__(
        self,
        key: EdgeKey,
        *,
        packets: PacketQueue,
        producer: str,
        window_bytes: int,
        max_chunk_bytes: int,
        on_closed: Callable[["InletAttempt"], None],
    ) -> None:
        self.key = key
        self.wire_key = wire.key_to_wire(key)
        self.packets = packets
        """Takes the packets of all attempts, to be read."""
        self.producer = producer
        self.incarnation = ""
        self.connector: ConnectorName = GRPC
        self.phase = Phase.WAITING
        self.error: StagemeshError | None = None
        self.is_read = False
        """Whether the reader has read everything up to End."""
        self.is_discarding = False
        """Whether the flow is received to its end without a reader."""
        self.queue: ReadyQueue[InletAttempt] | None = None
        """The queue of the stream that carries the attempt."""
        self.next_seq = 0
        """All chunks below it have arrived."""
        self.landing_account = MemoryAccount()
        """The attempt's use of the memory that chunks are fetched into."""
        self._credit = Credit(window_bytes)
        self._max_chunk_bytes, self._on_closed = max_chunk_bytes, on_closed
        self._reported_seq = 0
        self._arriving: deque[_Arrival] = deque()
        self._replies: list[stage_pb2.PutReply] = []
        self._digest = wire.FlowDigest()
        self._shape: wire.PacketShape | None = None
        self._resyncs = 0
        self._lost_timer: asyncio.TimerHandle | None = None

    # -- for the inlet

    @property
    def is_connected(self) -> bool:
        """Whether a stream carries the attempt."""
        return self.queue is not None

    @property
    def is_closed(self) -> bool:
        """Whether nothing is received any more."""
        return self.phase is Phase.CLOSED

    @property
    def is_resyncing(self) -> bool:
        """Whether messages are ignored until the producer opens the attempt again."""
        return self.phase is Phase.RESYNCING

    @property
    def credit_bytes(self) -> int:
        """Payload bytes that the producer may still send."""
        return self._credit.available_bytes

    def consume(self, size_bytes: int) -> None:
        """Counts payload bytes as read, which may grant credit."""
        if self._credit.consume(size_bytes):
            self._mark_ready()

    def close(self, error: StagemeshError) -> None:
        """Releases everything. The producer receives a commit if all was read, or else `error`."""
        if self.is_closed:
            return
        if self.is_read:
            self._reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=self.wire_key)))
        elif self.error is None:
            self._reject(error)
        self._mark_ready()
        self.phase = Phase.CLOSED
        self._drop_arriving()
        self._cancel_timer()
        self._on_closed(self)

    def supersede(self, error: StagemeshError) -> None:
        """Closes the attempt for a successor; what has arrived counts as read."""
        self.is_read = self.phase is Phase.ENDED
        self.close(error)

    def discard(self) -> None:
        """Receives the flow to its end without a reader, and then closes."""
        self.is_discarding = True
        self._await_producer()

    # -- for the session

    def attach(self, queue: "ReadyQueue[InletAttempt]", *, incarnation: str, connector: ConnectorName) -> None:
        """Continues on the producer's stream of `queue`, from what has arrived on."""
        if self.queue is not None and self.queue is not queue:
            # The former session learns that it does not carry the flow any more.
            self.queue.add(self)
        if self.phase is Phase.RESYNCING or connector != self.connector:
            self._drop_arriving()
        if self.phase is Phase.WAITING or self.phase is Phase.RESYNCING:
            self.phase = Phase.OPEN
        self.queue, self.incarnation, self.connector = queue, incarnation, connector
        self._cancel_timer()
        self._replies.clear()
        self._reported_seq = self.next_seq
        self._credit.report()

    def confirm(self, opening: int) -> None:
        """Answers the producer's OpenEdge of that number."""
        opened = stage_pb2.EdgeOpened(
            key=self.wire_key,
            next_seq=self.next_seq,
            credit_limit_bytes=self._credit.limit_bytes,
            connector=number_of(self.connector),
            opening=opening,
        )
        self._reply(stage_pb2.PutReply(opened=opened))

    def detach(self, queue: "ReadyQueue[InletAttempt]") -> None:
        """Waits LOST_PRODUCER_S for the producer to connect again, because the stream of `queue` ended."""
        if self.queue is queue:
            self.queue = None
            if self.phase is Phase.OPEN:
                self.phase = Phase.WAITING
            self._await_producer()

    def resync(self, error: StagemeshError, *, failed: ConnectorName | None = None) -> None:
        """Asks the producer to open the flow again, because a message was lost, and ignores all before that.

        A producer that does no better after MAX_RESYNCS is rejected with `error`.
        """
        if self.phase is not Phase.OPEN and self.phase is not Phase.WAITING:
            return
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            self.reject(error)
            return
        self.phase = Phase.RESYNCING
        resync = stage_pb2.EdgeResync(key=self.wire_key, error=wire.error_to_wire(error))
        if failed is not None:
            resync.failed = number_of(failed)
        self._reply(stage_pb2.PutReply(resync=resync))
        self._await_producer()

    def report(self, response: stage_pb2.PutChunkResponse) -> None:
        """Adds the replies, acknowledgement and credit that the producer has not been sent yet."""
        if self._replies:
            response.replies.extend(self._replies)
            self._replies.clear()
        if self.is_closed:
            return
        limit_bytes = self._credit.report()
        if self.next_seq > self._reported_seq:
            ack = response.replies.add().ack
            ack.key.CopyFrom(self.wire_key)
            ack.next_seq = self._reported_seq = self.next_seq
            if limit_bytes:
                ack.credit_limit_bytes = limit_bytes
        elif limit_bytes:
            credit = response.replies.add().credit
            credit.key.CopyFrom(self.wire_key)
            credit.limit_bytes = limit_bytes

    def lost_error(self) -> UnavailableError:
        """Returns the error for a reader whose producer does not return."""
        return UnavailableError(
            f"replica {self.producer} went away before chunk {self.next_seq} of edge {self.key.edge}",
            reason="PRODUCER_LOST",
            metadata={"edge": self.key.edge, "replica": self.producer, "seq": str(self.next_seq)},
        )

    def fail(self, error: StagemeshError) -> None:
        """Ends the reader with an error after the queued packets."""
        if self.error is None and self.phase is not Phase.ENDED and not self.is_closed:
            self.error, self.phase = error, Phase.FAILED
            self.packets.changed.fire()
            if self.is_discarding:
                self.close(error)

    def reject(self, error: StagemeshError) -> None:
        """Ends both the producer and the reader, because the producer broke the flow."""
        self._reject(error)
        self.fail(error)

    def check_credit(self, size_bytes: int) -> None:
        """Raises InvalidChunkError if that many more bytes exceed the credit."""
        if size_bytes > self.credit_bytes:
            raise InvalidChunkError(
                f"chunk {self.next_seq} of edge {self.key.edge} brings {size_bytes} bytes "
                f"where {self.credit_bytes} were granted",
                reason="CREDIT_EXCEEDED",
            )

    def demand(self, size_bytes: int) -> None:
        """Grants credit for a chunk larger than the window, as soon as everything before it is read."""
        if size_bytes > self._max_chunk_bytes:
            self.reject(
                InvalidChunkError(
                    f"a chunk of {size_bytes} bytes on edge {self.key.edge} exceeds the consumer's limit of "
                    f"{self._max_chunk_bytes}; cut it with `chunk: {{frames: N}}` or raise data_plane.arena_bytes",
                    reason="CHUNK_TOO_LARGE",
                )
            )
        elif self._credit.demand(size_bytes):
            self._mark_ready()

    def check_seq(self, seq: int) -> bool:
        """Returns whether `seq` is due; False if that chunk has arrived before. Raises InvalidChunkError for a gap."""
        due = self.next_seq + len(self._arriving)
        if seq > due or (self.phase is Phase.ENDED and seq == due):
            raise InvalidChunkError(
                f"chunk {seq} of edge {self.key.edge} came where {due} was due", reason="SEQUENCE_GAP"
            )
        return seq == due

    def deliver(self, packet: Packet) -> None:
        """Accepts the next data chunk, checked and within credit."""
        self._credit.received_bytes += packet.size_bytes
        if self._arriving:
            self._arriving.append(_Arrival(packet.size_bytes, lambda: self._accept(packet)))
        else:
            self._accept(packet)

    def deliver_later(self, transfer: asyncio.Task[Packet], *, size_bytes: int) -> None:
        """Accepts the next data chunk, whose bytes are under way; later chunks wait for it."""
        self._credit.received_bytes += size_bytes
        self._arriving.append(_Arrival(size_bytes, lambda: self._accept(transfer.result()), transfer))
        transfer.add_done_callback(lambda _: self._accept_arrived())

    def deliver_end(self, end: chunk_pb2.ChunkEnd) -> None:
        """Accepts the End; raises InvalidChunkError if it describes other chunks than those that arrived."""
        self._deliver_tail(lambda: self._accept_end(end))

    def deliver_abort(self, error: StagemeshError) -> None:
        """Accepts the Abort."""
        located = error.located(edge=self.key.edge, replica=self.producer)
        self._deliver_tail(lambda: self._accept_abort(located))

    # -- inner workings

    def _deliver_tail(self, accept: Callable[[], None]) -> None:
        if self._arriving:
            self._arriving.append(_Arrival(0, accept))
        else:
            accept()

    def _accept(self, packet: Packet) -> None:
        self._shape = shape = wire.shape_of(packet, last=self._shape)
        self._digest.add(shape)
        if self.is_discarding:
            self.consume(packet.size_bytes)
        elif self.error is None and not self.is_closed:
            self.packets.accept(packet, self.consume)
        self._advance()

    def _accept_end(self, end: chunk_pb2.ChunkEnd) -> None:
        expected = self._digest.end()
        if end.count != expected.count or not hmac.compare_digest(end.digest, expected.digest):
            raise InvalidChunkError(
                f"edge {self.key.edge} ended after {end.count} chunks where {expected.count} came, or they differ",
                reason="DIGEST_MISMATCH",
            )
        if self.error is None:
            if not self.is_discarding:
                self.packets.accept_end()
            self.phase = Phase.ENDED
        self._advance()
        if self.is_discarding:
            self.is_read = True
            self.close(self.lost_error())

    def _accept_abort(self, error: StagemeshError) -> None:
        self.fail(error)
        self._advance()

    def _accept_arrived(self) -> None:
        """Accepts, in order, the chunks that have arrived. A failed transfer has the flow opened again."""
        while self._arriving:
            transfer = self._arriving[0].transfer
            if transfer is not None and not transfer.done():
                return
            arrival = self._arriving.popleft()
            try:
                arrival.accept()
            except UnavailableError as exc:
                self._arriving.appendleft(arrival)
                self.resync(exc, failed=self.connector)
                return
            except StagemeshError as exc:
                self.reject(exc)
                return

    def _drop_arriving(self) -> None:
        """Drops the chunks that are under way; the producer sends them again."""
        while self._arriving:
            arrival = self._arriving.pop()
            self._credit.received_bytes -= arrival.size_bytes
            if arrival.transfer is not None:
                arrival.transfer.cancel()

    def _advance(self) -> None:
        self.next_seq += 1
        self._resyncs = 0
        # The engine first: the acknowledgement is not urgent.
        self.packets.changed.fire()
        self._mark_ready()

    def _mark_ready(self) -> None:
        if self.queue is not None and not self.is_closed:
            self.queue.add(self)

    def _reject(self, error: StagemeshError) -> None:
        rejected = stage_pb2.EdgeRejected(key=self.wire_key, error=wire.error_to_wire(error))
        self._reply(stage_pb2.PutReply(rejected=rejected))

    def _reply(self, reply: stage_pb2.PutReply) -> None:
        if self.queue is not None:
            self._replies.append(reply)
            self._mark_ready()

    def _await_producer(self) -> None:
        waits = self.phase is not Phase.ENDED and self.error is None and not self.is_closed
        if waits and self._lost_timer is None:
            loop = asyncio.get_running_loop()
            self._lost_timer = loop.call_later(LOST_PRODUCER_S, self.fail, self.lost_error())

    def _cancel_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
