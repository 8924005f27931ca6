"""One attempt of an outlet. The attempt tracks one consumer's credit and creates the messages to that consumer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from enum import Enum, auto
from typing import TypeAlias

from stagemesh.common.errors import InvalidChunkError, NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import GRPC, ConnectorName, number_of
from stagemesh.common.wire.encoding import to_message
from stagemesh.connectors import fragments, peer_timeouts, wire
from stagemesh.connectors.base import Connector
from stagemesh.connectors.flow.edge_meters import EdgeMeter
from stagemesh.connectors.flow.flow_control import CreditLimit, ReadyQueue
from stagemesh.connectors.flow.sent_chunks import Leases, SentChunk, SentChunks
from stagemesh.connectors.packets import EdgeKey
from stagemesh.v1 import chunk_pb2, stage_pb2

MAX_RESYNCS = 10
"""The maximum number of times that a consumer may request a resync without acknowledging a new chunk."""
_NO_CREDIT = CreditLimit(-1, 0)
"""The credit limit before the consumer has accepted the attempt. Not even an empty chunk may be sent."""


class Phase(Enum):
    """The state of an outlet's attempt."""

    WAITING = auto()
    """No stream carries the attempt. The link has yet to open the attempt on a stream."""
    OPENING = auto()
    """The producer has sent OpenEdge. The consumer has not answered yet."""
    OPEN = auto()
    """The consumer accepts chunks."""
    COMMITTED = auto()
    """The consumer has confirmed that it has received all chunks."""
    FAILED = auto()
    """The attempt has ended because of an error, or because another attempt replaced it."""


OnOver: TypeAlias = Callable[[StagemeshError | None], None]
"""A callback for the end of an attempt. Called once, with the attempt's error, or with None after a commit."""


class OutletAttempt:
    """One attempt of an outlet, in which the outlet sends chunks to one consumer within the consumer's credit.

    The link to the consumer opens the attempt on a stream, and passes the consumer's replies to the attempt. The stream
    pulls messages from the attempt.
    """

    def __init__(self, key: EdgeKey, wanted: ConnectorName, chunks: SentChunks, *, on_over: OnOver) -> None:
        """Creates an attempt that requests the connector `wanted`. If `wanted` is AUTO, the connector is negotiated."""
        self.key, self.wanted, self.connector = key, wanted, wanted
        self.wire_key = wire.key_to_wire(key)
        self.phase = Phase.WAITING
        self.credit = _NO_CREDIT
        """The credit limit in payload bytes. The limit includes all bytes since the flow's first chunk."""
        self.inline_limit_bytes = 0
        self.meter = EdgeMeter()
        """The counts of the edge over the connector in use. Before the first opening, an unused meter."""
        self.chunks, self._on_over = chunks, on_over
        self._leases = Leases()
        self._attend: Callable[[OutletAttempt], None] = lambda _: None
        self._queue: ReadyQueue[OutletAttempt] | None = None
        self._reader: Connector | None = None
        self._window_bytes = 0
        self._demanded_bytes = 0
        """The highest credit limit that the attempt has demanded on this stream, in bytes.

        0 before the first demand.
        """
        self._fragments: Iterator[fragments.Fragment] | None = None
        self._openings = self._resyncs = 0
        self._now_s = asyncio.get_running_loop().time
        self._heard_s, self._patience_s = self._now_s(), peer_timeouts.REOPEN_S
        """The time of the consumer's last answer, and the permitted time without an answer, both in seconds."""

    # -- for the outlet

    def add(self, sent: SentChunk) -> None:
        """Makes a new chunk pending if the attempt is open.

        Otherwise, the chunk becomes pending when the attempt is opened.
        """
        chunks = self.chunks
        if len(chunks.unacked) == 1:
            self._note_answer()
        if self.phase is Phase.OPEN:
            chunks.pending.append(sent)
            self.mark_ready()

    def mark_ready(self) -> None:
        """Adds the attempt to its stream's ready queue if it has messages to send."""
        if self._queue is not None and self.has_messages:
            self._queue.add(self)

    def supersede(self) -> None:
        """Ends the attempt because another attempt replaces it. Does not call `on_over`."""
        if not self.is_over:
            self._leave(Phase.FAILED)

    # -- for the link

    def join(self, leases: Leases, attend: Callable[["OutletAttempt"], None]) -> None:
        """Adds the attempt to the link that opens it.

        Args:
            leases: The consumer's leases on regions of the arena.
            attend: Called immediately, and again when the attempt must be reopened or has ended.
        """
        self._leases, self._attend = leases, attend
        attend(self)

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended and no longer sends messages."""
        return self.phase is Phase.COMMITTED or self.phase is Phase.FAILED

    @property
    def was_opened(self) -> bool:
        """Whether the consumer has ever accepted the attempt."""
        return self.credit is not _NO_CREDIT

    def opening(
        self,
        connector: ConnectorName,
        *,
        reader: Connector | None,
        queue: "ReadyQueue[OutletAttempt]",
        inline_limit_bytes: int,
    ) -> stage_pb2.PutItem:
        """Moves the attempt to the stream of `queue`. Returns the OpenEdge item to send over that stream.

        Args:
            connector: The negotiated connector.
            reader: This replica's instance of that connector, or None for grpc.
            queue: The ready queue of the stream.
            inline_limit_bytes: The maximum size, in bytes, of a chunk that is sent inline.
        """
        self.disconnect()
        self.phase, self._queue = Phase.OPENING, queue
        self._openings += 1
        self.connector, self._reader, self.inline_limit_bytes = connector, reader, inline_limit_bytes
        self.meter = self.chunks.meters.of(self.key.edge, connector)
        self._heard_s = self._now_s()
        opening = stage_pb2.OpenEdge(key=self.wire_key, connector=number_of(connector), opening=self._openings)
        return stage_pb2.PutItem(open=opening)

    def opened(self, reply: stage_pb2.EdgeOpened) -> None:
        """Processes the consumer's answer to OpenEdge. Begins to send chunks from number `reply.next_seq`.

        Ignores an answer to an earlier OpenEdge.
        """
        if reply.opening != self._openings or self.phase is not Phase.OPENING:
            # This answer belongs to an earlier OpenEdge or is repeated, so it is obsolete.
            return
        if reply.next_seq < self.chunks.acked:
            raise InvalidChunkError(
                f"edge {self.key.edge}: the consumer asks for chunk {reply.next_seq} again, although it has "
                f"acknowledged the chunks before {self.chunks.acked}"
            )
        self.acknowledge(reply.next_seq)
        if self.is_over:
            return
        self.chunks.resend(self._leases)
        self.phase, self._demanded_bytes = Phase.OPEN, 0
        self._window_bytes = reply.window_bytes
        self.grant(reply.credit_limit_bytes, reply.credit_limit_chunks)
        self.mark_ready()
        self.chunks.changed.fire()

    def reopen(self) -> None:
        """Asks the link to open the attempt again. Does nothing if the attempt has ended."""
        if not self.is_over:
            self.disconnect()
            self._attend(self)

    def resync(self, error: StagemeshError) -> None:
        """Reopens the attempt at the consumer's request. `error` is the reason for the request.

        Raises InvalidChunkError after more than MAX_RESYNCS requests without a newly acknowledged chunk.
        """
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            raise InvalidChunkError(
                f"edge {self.key.edge}: the consumer requested resyncs again and again at chunk {self.chunks.acked}: "
                f"{error.message}"
            )
        self.reopen()

    def grant(self, limit_bytes: int, limit_chunks: int) -> None:
        """Raises the credit limits to `limit_bytes` and `limit_chunks`. Ignores a limit that is not higher.

        Does nothing while the attempt is not open. The consumer's answer to OpenEdge will contain the current limits.
        """
        credit = self.credit
        # Most acknowledgements raise no limit.
        if self.phase is Phase.OPEN and (limit_bytes > credit.size_bytes or limit_chunks > credit.chunks):
            self.credit = CreditLimit(max(limit_bytes, credit.size_bytes), max(limit_chunks, credit.chunks))
            self._note_answer()
            self.mark_ready()
            self.chunks.changed.fire()

    def acknowledge(self, next_seq: int) -> None:
        """Marks all chunks with numbers below `next_seq` as delivered.

        Raises InvalidChunkError if the consumer acknowledges a chunk that was never sent.
        """
        self._count_delivered(next_seq)
        if self.chunks.acknowledge(next_seq):
            self._resyncs = 0
            self._note_answer()
            if self.chunks.is_delivered:
                if self.chunks.is_aborted:
                    self.commit()
                self.chunks.changed.fire()

    def commit(self) -> None:
        """Ends the attempt because the consumer has received all chunks.

        Raises InvalidChunkError if the producer has not finished the flow.
        """
        if not self.chunks.ended:
            raise InvalidChunkError(f"edge {self.key.edge}: the consumer committed the flow before its end")
        if not self.is_over:
            self._count_delivered(self.chunks.next_seq)
            self.chunks.acked = self.chunks.next_seq
            on_over = self._on_over
            self._leave(Phase.COMMITTED)
            on_over(None)

    def fail(self, error: StagemeshError) -> None:
        """Ends the attempt with an error. Does nothing if the attempt has ended."""
        if not self.is_over:
            on_over = self._on_over
            self._leave(Phase.FAILED)
            on_over(error)

    def check_silence(self, now_s: float) -> None:
        """Reopens the attempt if an answer is due and the consumer has been silent for too long.

        A message may then be missing. `now_s` is the current time of the event loop in seconds. Each reopening doubles
        the permitted time without an answer, up to a maximum.
        """
        chunks = self.chunks
        if not (chunks.unacked or chunks.wanted_bytes or self.phase is not Phase.OPEN or chunks.ended):
            # No answer is expected, so silence does not count.
            self._heard_s = now_s
        elif now_s - self._heard_s > self._patience_s:
            self._heard_s, self._patience_s = now_s, min(2 * self._patience_s, peer_timeouts.MAX_REOPEN_S)
            self.reopen()

    # -- for the stream

    @property
    def has_messages(self) -> bool:
        """Whether the attempt can send at least one message now."""
        return self.phase is Phase.OPEN and (self._has_chunk or self._fragments is not None or self._demands_credit)

    @property
    def sends_fragments(self) -> bool:
        """Whether the next chunk is sent as fragments. Each fragment is sent in its own message."""
        return self.connector == GRPC and (
            self._fragments is not None or (self._has_chunk and bool(self.chunks.pending[0].regions))
        )

    def fill(self, request: stage_pb2.PutChunkRequest, budget_bytes: int) -> int:
        """Adds pending items to `request`, up to about `budget_bytes` bytes. Adds at least one item if any can be sent.

        Returns the approximate number of bytes of the added chunks. Skips chunks that are sent as fragments.
        """
        used_bytes = 0
        pending = self.chunks.pending
        if self._demands_credit:
            demand = request.items.add().demand
            demand.key.CopyFrom(self.wire_key)
            demand.size_bytes, self._demanded_bytes = self._blocked
        may_fragment = self.connector == GRPC
        while used_bytes < budget_bytes and self._has_chunk and not (may_fragment and pending[0].regions):
            sent = pending.popleft()
            self._encode(request.items.add().chunk, sent)
            values = len(sent.tensors or ()) + len(sent.metadata or ())
            used_bytes += wire.ITEM_BYTES + wire.VALUE_BYTES * values + (0 if sent.regions else sent.size_bytes)
            if sent.tickets:
                used_bytes += sum(wire.VALUE_BYTES + len(ticket.descriptor) for ticket in sent.offered)
        return used_bytes

    def take_fragment(self) -> bytes:
        """Returns the serialized message with the next fragment of the first pending chunk.

        The message with the chunk's last fragment also contains the chunk's description.
        """
        sent = self.chunks.pending[0]
        assert sent.tensors is not None, "only data is sent as fragments"
        if self._fragments is None:
            self._fragments = fragments.split_into_fragments(
                self.wire_key, sent.tensors, total_bytes=sent.size_bytes, seq=sent.seq
            )
        fragment = next(self._fragments)
        if fragment.message.offset + len(fragment.payload) < fragment.message.total_bytes:
            return fragments.encode_fragment(fragment)
        self._fragments = None
        self.chunks.pending.popleft()
        rest = stage_pb2.PutChunkRequest()
        self._encode(rest.items.add().chunk, sent, is_streamed=True)
        return fragments.encode_fragment(fragment, rest=rest.SerializeToString())

    async def replay(self, *, first_seq: int) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
        """Yields the chunks of the flow from number `first_seq` to the end of the flow, without their leases.

        Waits for chunks that have not been produced yet. Raises NotReadyError (CHUNK_GONE) if a chunk is no longer
        retained.
        """
        seq = first_seq
        while True:
            kept = self.chunks.retained_from(seq)
            if kept is None:
                raise NotReadyError(f"chunk {seq} of edge {self.key.edge} is no longer kept", reason="CHUNK_GONE")
            for sent in kept[:1]:
                for response in sent.replay(self.wire_key):
                    yield response
                seq = sent.seq + 1
            if not kept:
                if self.chunks.ended or self.phase is Phase.FAILED:
                    return
                await self.chunks.changed.wait()

    # -- inner workings

    def _count_delivered(self, next_seq: int) -> None:
        """Counts and traces the chunks with numbers below `next_seq` that are being acknowledged."""
        now_s, trace = time.monotonic(), self.chunks.trace
        for sent in self.chunks.unacked:
            if sent.seq >= next_seq:
                break
            if sent.tail is not None:
                continue
            self.meter.add(sent.size_bytes, now_s - sent.sent_s)
            if trace is not None:
                connector = number_of(self.connector)
                span = to_message(stage_pb2.ChunkSpan, sent, edge=self.key.edge, connector=connector)
                trace.add_chunk(span, offered_s=sent.offered_s, acknowledged_s=now_s)

    def _note_answer(self) -> None:
        self._heard_s, self._patience_s = self._now_s(), peer_timeouts.REOPEN_S

    @property
    def _has_chunk(self) -> bool:
        """Whether a chunk is pending and the credit limit allows it to be sent."""
        pending = self.chunks.pending
        return bool(pending) and pending[0].is_within(self.credit)

    @property
    def _blocked(self) -> tuple[int, int]:
        """The size of the next chunk that lacks credit, and the credit limit that the chunk requires, both in bytes.

        (0, 0) if no chunk lacks credit.
        """
        chunks = self.chunks
        if chunks.pending:
            size_bytes, end_bytes = chunks.pending[0].size_bytes, chunks.pending[0].end_bytes
        else:
            size_bytes, end_bytes = chunks.wanted_bytes, chunks.sent_bytes + chunks.wanted_bytes
        return (size_bytes, end_bytes) if end_bytes > self.credit.size_bytes else (0, 0)

    @property
    def _demands_credit(self) -> bool:
        """Whether the attempt must demand credit, because the next chunk is larger than half the credit window.

        Credit for smaller chunks arrives when the earlier chunks are read. The consumer withholds small raises of the
        limit, so larger chunks may never receive enough credit without a demand.
        """
        size_bytes, end_bytes = self._blocked
        return 2 * size_bytes > self._window_bytes and end_bytes > self._demanded_bytes

    def _encode(self, chunk: chunk_pb2.Chunk, sent: SentChunk, *, is_streamed: bool = False) -> None:
        if sent.tail is None:
            if sent.sent_s:
                self.meter.resent += 1
            sent.sent_s = time.monotonic()
            if sent.tickets:
                sent.lease_id = self._leases.grant_tickets(sent)
            elif sent.regions and self._reader is not None:
                sent.lease_id, sent.reader = self._leases.grant(sent.regions), self._reader
                self._reader.expect_reads(1)
        sent.fill(chunk, self.wire_key, is_streamed=is_streamed, lease_id=sent.lease_id)

    def disconnect(self) -> None:
        """Detaches the attempt from its stream. The link later opens the attempt again."""
        self.phase, self._fragments = Phase.WAITING, None
        self.chunks.stop_sending()
        if self._queue is not None:
            self._queue.discard(self)
            self._queue = None

    def _leave(self, phase: Phase) -> None:
        """Ends the attempt in state `phase`. Removes the attempt from its stream and its link."""
        self.disconnect()
        self.phase = phase
        # The former callback refers to the outlet, which only the garbage collector would free.
        del self._on_over
        self._attend(self)
