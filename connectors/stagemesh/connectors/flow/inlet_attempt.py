"""One attempt of an inlet. The attempt ensures the order of one producer's chunks and manages its credit."""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, TypeAlias

from stagemesh.common.errors import InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import GRPC, ConnectorName, number_of
from stagemesh.connectors import peer_timeouts, wire
from stagemesh.connectors.base import MemoryAccount
from stagemesh.connectors.flow.flow_control import Credit, ReadyQueue
from stagemesh.connectors.flow.received_rows import PacketQueue
from stagemesh.connectors.packets import EdgeKey, FirstRows, Packet
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import chunk_pb2, stage_pb2

MAX_RESYNCS = 3
"""The maximum number of times that the consumer asks a producer to reopen a flow at the same chunk.

After that, the consumer rejects the producer.
"""


class Phase(Enum):
    """The state of an inlet's attempt."""

    WAITING = auto()
    """No stream carries the attempt. The consumer waits until the producer opens the attempt."""
    OPEN = auto()
    """The attempt accepts chunks."""
    RESYNCING = auto()
    """A message is missing or a transfer has failed. The attempt ignores messages until the producer reopens it."""
    ENDED = auto()
    """All chunks and the End message have arrived."""
    FAILED = auto()
    """An error ended the attempt. The reader receives the error after the packets that have arrived."""
    CLOSED = auto()
    """The inlet was closed, or another attempt replaced this attempt."""


class _Arrival(NamedTuple):
    """A received message that waits for its own transfer, or for the transfers of earlier chunks."""

    size_bytes: int
    overhead_bytes: int
    accept: Callable[[], None]
    """A function that accepts the message. Raises the transfer's error if the transfer failed."""
    transfer: asyncio.Task[Packet] | None = None
    """The task that fetches the chunk's bytes, or None if no bytes must be fetched."""


OnClosed: TypeAlias = Callable[["InletAttempt"], None]
"""A callback for a closed attempt. Called once, with the attempt."""


class InletAttempt:
    """One attempt of an inlet, in which the inlet receives chunks from one producer.

    The attempt ensures order and exactly-once delivery, and manages the producer's credit. The consumer session passes
    the producer's messages to the attempt and sends the attempt's replies to the producer.
    """

    def __init__(
        self, key: EdgeKey, packets: PacketQueue, *, producer: str, credit: Credit, on_closed: OnClosed
    ) -> None:
        self.key = key
        self.wire_key = wire.key_to_wire(key)
        self.packets = packets
        """The received packets that have not been read. All attempts of the inlet share this queue."""
        self.producer = producer
        self.incarnation = ""
        self.connector: ConnectorName = GRPC
        self.phase = Phase.WAITING
        self.error: StagemeshError | None = None
        self.is_read = False
        """Whether the reader has read all packets and the end of the flow."""
        self.is_discarding = False
        """Whether the attempt discards the chunks that it receives, because the inlet already has all packets."""
        self.queue: ReadyQueue[InletAttempt] | None = None
        """The ready queue of the stream that carries the attempt. None if no stream carries the attempt."""
        self.next_seq = 0
        """The sequence number of the next chunk to accept. All earlier chunks have been accepted."""
        self.landing_account = MemoryAccount()
        """The memory account of the attempt's fetched chunks in the landing arena."""
        self._credit, self._on_closed = credit, on_closed
        self._overhead_bytes = 0
        self._reported_seq = 0
        self._arriving: deque[_Arrival] = deque()
        self._replies: list[stage_pb2.PutReply] = []
        self._digest = wire.FlowDigest()
        self._shape: wire.PacketShape | None = None
        self._resyncs = 0
        self._lost_timer: asyncio.TimerHandle | None = None

    # -- for the inlet

    @property
    def is_closed(self) -> bool:
        """Whether the attempt is closed and receives no further messages."""
        return self.phase is Phase.CLOSED

    @property
    def credit_bytes(self) -> int:
        """The producer's remaining credit in payload bytes."""
        return self._credit.available_bytes

    def consume(self, size_bytes: int, overhead_bytes: int) -> None:
        """Counts a chunk as read. Grants the producer more credit if enough payload bytes have been read."""
        self._overhead_bytes -= overhead_bytes
        if self._credit.consume(size_bytes):
            self._mark_ready()

    def close(self, error: StagemeshError) -> None:
        """Closes the attempt and drops the chunks whose transfer is in progress. Idempotent.

        Sends a commit to the producer if the reader has read the end of the flow. Otherwise, sends `error` to the
        producer, unless the attempt has already failed.
        """
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
        """Closes the attempt because another attempt replaces it.

        Sends a commit to the producer if all chunks and the End message have arrived. Otherwise, sends `error` to the
        producer, unless the attempt has already failed.
        """
        self.is_read = self.phase is Phase.ENDED
        self.close(error)

    def discard(self) -> None:
        """Makes the attempt receive and discard all further chunks. The attempt closes after the End message."""
        self.is_discarding = True
        self._await_producer()

    # -- for the session

    def attach(self, queue: "ReadyQueue[InletAttempt]", *, incarnation: str, connector: ConnectorName) -> None:
        """Moves the attempt to the stream of `queue`. The attempt continues after the last chunk that has arrived.

        `incarnation` is the producer's incarnation, and `connector` is the negotiated connector.
        """
        if self.queue is not None and self.queue is not queue:
            # Notifies the previous session that it no longer carries the flow.
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
        """Answers the producer's OpenEdge message. `opening` is the number in that message."""
        opened = stage_pb2.EdgeOpened(
            key=self.wire_key,
            next_seq=self.next_seq,
            credit_limit_bytes=self._credit.limit_bytes,
            connector=number_of(self.connector),
            opening=opening,
            window_bytes=self._credit.window_bytes,
            credit_limit_chunks=self._credit.limit_chunks,
        )
        self._reply(stage_pb2.PutReply(opened=opened))

    def detach(self, queue: "ReadyQueue[InletAttempt]") -> None:
        """Detaches the attempt from the stream of `queue` because that stream has ended.

        The attempt fails if the producer does not reconnect within LOST_PRODUCER_S seconds. Does nothing if another
        stream carries the attempt.
        """
        if self.queue is queue:
            self.queue = None
            if self.phase is Phase.OPEN:
                self.phase = Phase.WAITING
            self._await_producer()

    def resync(self, error: StagemeshError, *, failed: ConnectorName | None = None) -> None:
        """Asks the producer to reopen the flow, because a message is missing or a transfer has failed.

        Ignores all messages until the flow is reopened. Rejects the producer with `error` if no new chunk has arrived
        after MAX_RESYNCS requests. `failed` is the name of the connector that failed, or None if no connector failed.
        """
        if self.phase is not Phase.OPEN and self.phase is not Phase.WAITING:
            return
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            self.reject(error)
            return
        self.phase = Phase.RESYNCING
        resync = stage_pb2.EdgeResync(key=self.wire_key, error=error_to_wire(error))
        if failed is not None:
            resync.failed = number_of(failed)
        self._reply(stage_pb2.PutReply(resync=resync))
        self._await_producer()

    def report(self, response: stage_pb2.PutChunkResponse) -> None:
        """Adds the attempt's unsent replies, acknowledgement and credit to `response`."""
        if self._replies:
            response.replies.extend(self._replies)
            self._replies.clear()
        # A closed attempt also acknowledges, because the producer of an aborted flow waits for nothing else.
        limit_bytes, limit_chunks = self._credit.report()
        if self.next_seq > self._reported_seq:
            ack = response.replies.add().ack
            ack.key.CopyFrom(self.wire_key)
            ack.next_seq = self._reported_seq = self.next_seq
            grant: stage_pb2.ChunkAck | stage_pb2.CreditGrant = ack
        elif limit_bytes is not None or limit_chunks is not None:
            grant = response.replies.add().credit
            grant.key.CopyFrom(self.wire_key)
        else:
            return
        if limit_bytes is not None:
            grant.credit_limit_bytes = limit_bytes
        if limit_chunks is not None:
            grant.credit_limit_chunks = limit_chunks

    def lost_error(self) -> UnavailableError:
        return UnavailableError(
            f"replica {self.producer} was lost before chunk {self.next_seq} of edge {self.key.edge}",
            reason="PEER_LOST",
            metadata={"edge": self.key.edge, "replica": self.producer, "seq": str(self.next_seq)},
        )

    def fail(self, error: StagemeshError) -> None:
        """Ends the attempt with an error. The reader receives the error after the queued packets."""
        if self.error is None and self.phase is not Phase.ENDED and not self.is_closed:
            self.error, self.phase = error, Phase.FAILED
            self.packets.changed.fire()
            if self.is_discarding:
                self.close(error)

    def reject(self, error: StagemeshError) -> None:
        """Ends the attempt because the producer violated the protocol.

        Reports `error` to both the producer and the reader.
        """
        self._reject(error)
        self.fail(error)

    def check_credit(self, seq: int, size_bytes: int, *, overhead_bytes: int = 0) -> None:
        """Raises InvalidChunkError (CREDIT_EXCEEDED) if the chunk `seq`, which is the next one, exceeds the producer's
        remaining credit, or if the unread chunks would take more memory than `wire.MAX_OVERHEAD_BYTES` in addition to
        their payload.
        """
        if self._overhead_bytes + overhead_bytes > wire.MAX_OVERHEAD_BYTES:
            raise InvalidChunkError(
                f"the unread chunks of edge {self.key.edge} take more than {wire.MAX_OVERHEAD_BYTES} bytes in addition "
                "to their payload; send fewer, larger chunks",
                reason="CREDIT_EXCEEDED",
            )
        if size_bytes > self.credit_bytes or seq >= self._credit.limit_chunks:
            raise InvalidChunkError(
                f"chunk {seq} of edge {self.key.edge} has {size_bytes} bytes, but only {self.credit_bytes} "
                f"bytes and the chunks before {self._credit.limit_chunks} were granted",
                reason="CREDIT_EXCEEDED",
            )

    def demand(self, size_bytes: int) -> None:
        """Requests credit for the producer's next chunk.

        The credit is granted when all earlier chunks have been read. Rejects the producer if `size_bytes` exceeds the
        consumer's maximum chunk size.
        """
        limit_bytes = self._credit.max_chunk_bytes
        if size_bytes > limit_bytes:
            self.reject(
                InvalidChunkError(
                    f"a chunk of {size_bytes} bytes on edge {self.key.edge} exceeds the consumer's limit of "
                    f"{limit_bytes}; cut it with `chunk: {{frames: N}}` or raise data_plane.arena_bytes",
                    reason="CHUNK_TOO_LARGE",
                )
            )
        elif self._credit.demand(size_bytes):
            self._mark_ready()

    def check_seq(self, seq: int) -> bool:
        """Returns True if `seq` is the next chunk's sequence number, or False if the chunk `seq` has already arrived.

        Raises InvalidChunkError (SEQUENCE_GAP) if an earlier chunk is missing.
        """
        due = self._due_seq
        if seq > due or (self.phase is Phase.ENDED and seq == due):
            raise InvalidChunkError(
                f"chunk {seq} of edge {self.key.edge} arrived when {due} was due", reason="SEQUENCE_GAP"
            )
        return seq == due

    def deliver(self, packet: Packet, first_rows: FirstRows, overhead_bytes: int) -> None:
        """Accepts the next data chunk, after all earlier chunks.

        The caller must have checked the chunk's number and credit. `overhead_bytes` is the memory that the chunk takes
        in addition to its payload.
        """
        if self._arriving:
            self._deliver(lambda: self._accept(packet, first_rows, overhead_bytes), packet.size_bytes, overhead_bytes)
        else:
            self._count_received(packet.size_bytes, overhead_bytes)
            self._accept(packet, first_rows, overhead_bytes)
            self._advance()

    def deliver_later(
        self, transfer: asyncio.Task[Packet], *, size_bytes: int, first_rows: FirstRows, overhead_bytes: int
    ) -> None:
        """Accepts the next data chunk when `transfer` has fetched the chunk's bytes.

        Later chunks are accepted after this chunk. `size_bytes` is the chunk's number of payload bytes.
        """
        self._count_received(size_bytes, overhead_bytes)

        def accept() -> None:
            self._accept(transfer.result(), first_rows, overhead_bytes)

        self._arriving.append(_Arrival(size_bytes, overhead_bytes, accept, transfer))
        transfer.add_done_callback(lambda _: self._accept_arrived())

    def deliver_end(self, end: chunk_pb2.ChunkEnd) -> None:
        """Accepts the End message after all earlier chunks.

        Raises InvalidChunkError (DIGEST_MISMATCH) if the message's chunk count or digest does not match the chunks that
        have arrived.
        """
        self._deliver(lambda: self._accept_end(end))

    def deliver_abort(self, error: StagemeshError) -> None:
        """Accepts the producer's Abort message after all earlier chunks. The reader then receives `error`."""
        located = error.located(edge=self.key.edge, replica=self.producer)
        self._deliver(lambda: self.fail(located))

    # -- inner workings

    @property
    def _due_seq(self) -> int:
        """The number of the chunk that must arrive next. Chunks before it may still be fetched."""
        return self.next_seq + len(self._arriving)

    def _deliver(self, accept: Callable[[], None], size_bytes: int = 0, overhead_bytes: int = 0) -> None:
        """Accepts the next message by calling `accept`, either now or as soon as all earlier chunks have been accepted.

        `size_bytes` is the message's number of payload bytes. These bytes count against the producer's credit
        immediately.
        """
        self._count_received(size_bytes, overhead_bytes)
        if self._arriving:
            self._arriving.append(_Arrival(size_bytes, overhead_bytes, accept))
        else:
            accept()
            self._advance()

    def _count_received(self, size_bytes: int, overhead_bytes: int) -> None:
        self._credit.received_bytes += size_bytes
        self._overhead_bytes += overhead_bytes

    def _accept(self, packet: Packet, first_rows: FirstRows, overhead_bytes: int) -> None:
        consume = partial(self.consume, packet.size_bytes, overhead_bytes)
        shape = wire.shape_of(packet, last=self._shape)
        if shape is not self._shape and not self.is_discarding:
            self.packets.check(packet)
        self._shape = shape
        self._digest.add(shape)
        if self.is_discarding:
            consume()
        elif self.error is None and not self.is_closed:
            self.packets.accept(packet, shape.rows, first_rows, consume)

    def _accept_end(self, end: chunk_pb2.ChunkEnd) -> None:
        expected = self._digest.end()
        if (end.count, end.digest) != (expected.count, expected.digest):
            raise InvalidChunkError(
                f"edge {self.key.edge} ended after {end.count} chunks, but {expected.count} arrived, or they differ",
                reason="DIGEST_MISMATCH",
            )
        if self.error is None:
            if not self.is_discarding:
                self.packets.accept_end()
            self.phase = Phase.ENDED
        if self.is_discarding:
            self.is_read = True
            self.close(self.lost_error())

    def _accept_arrived(self) -> None:
        """Accepts the waiting messages in order. Stops before the first chunk whose transfer is in progress.

        Asks the producer to reopen the flow if a transfer has failed.
        """
        while self._arriving:
            transfer = self._arriving[0].transfer
            if transfer is not None and not transfer.done():
                return
            arrival = self._arriving.popleft()
            try:
                arrival.accept()
                self._advance()
            except UnavailableError as exc:
                self._arriving.appendleft(arrival)
                self.resync(exc, failed=self.connector)
                return
            except StagemeshError as exc:
                self.reject(exc)
                return

    def _drop_arriving(self) -> None:
        """Drops the waiting messages and cancels their transfers. The producer sends these messages again."""
        while self._arriving:
            arrival = self._arriving.pop()
            self._count_received(-arrival.size_bytes, -arrival.overhead_bytes)
            if arrival.transfer is not None:
                arrival.transfer.cancel()

    def _advance(self) -> None:
        self.next_seq += 1
        self._resyncs = 0
        # Wakes the reader first, because the acknowledgement is less urgent.
        self.packets.changed.fire()
        self._mark_ready()

    def _mark_ready(self) -> None:
        if self.queue is not None and not self.is_closed:
            self.queue.add(self)

    def _reject(self, error: StagemeshError) -> None:
        rejected = stage_pb2.EdgeRejected(key=self.wire_key, error=error_to_wire(error))
        self._reply(stage_pb2.PutReply(rejected=rejected))

    def _reply(self, reply: stage_pb2.PutReply) -> None:
        if self.queue is not None:
            self._replies.append(reply)
            self._mark_ready()

    def _await_producer(self) -> None:
        waits = self.phase is not Phase.ENDED and self.error is None and not self.is_closed
        if waits and self._lost_timer is None:
            loop = asyncio.get_running_loop()
            self._lost_timer = loop.call_later(peer_timeouts.LOST_PRODUCER_S, self.fail, self.lost_error())

    def _cancel_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
