"""One attempt of a flow's producing end: credit, and the messages for one consumer."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import NamedTuple

from stagemesh.common.connector_descriptors import GRPC, ConnectorName, number_of
from stagemesh.common.errors import InvalidChunkError, StagemeshError
from stagemesh.connectors.base import Connector
from stagemesh.connectors.edge import EdgeKey, ReadyQueue
from stagemesh.connectors.flow.ledger import Leases, Ledger, SentChunk
from stagemesh.connectors.stream import wire
from stagemesh.v1 import chunk_pb2, stage_pb2

_REOPEN_S, _MAX_REOPEN_S = 2.0, 30.0
"""How long a consumer may be silent before its flow is opened again, at first and at most."""
MAX_RESYNCS = 10
"""How often a consumer may have a flow opened again without a new chunk arriving."""
_ITEM_BYTES = 200
"""Approximate size of a chunk on the wire without its payload."""
_transfer_ids = itertools.count(1)
"""Transfer ids rise over every stream, so that a consumer tells a repeated fragment from a new transfer."""


class Phase(Enum):
    """The state of an attempt."""

    WAITING = auto()
    """No stream carries the attempt; it must be opened."""
    OPENING = auto()
    """OpenEdge was sent, and the consumer has not answered yet."""
    OPEN = auto()
    """The consumer accepts chunks."""
    COMMITTED = auto()
    """The consumer has everything."""
    FAILED = auto()
    """An error or a successor ended the attempt."""


class Route(NamedTuple):
    """The way of one attempt to its consumer."""

    key: EdgeKey
    wanted: ConnectorName
    leases: Leases
    attend: Callable[["OutletAttempt"], None]
    """Called when the attempt must be opened or is over."""


class OutletAttempt:
    """Sends an outlet's chunks to one consumer: credit, and the messages that are to be sent next.

    The link opens the attempt on a stream. The stream pulls messages from it, and the link applies the replies.
    """

    def __init__(self, route: Route, ledger: Ledger, *, on_over: Callable[[StagemeshError | None], None]) -> None:
        """Calls `on_over` once: with None when the attempt is committed, with the error if it fails."""
        self.key, self.wanted, self._leases, self._attend = route
        self.wire_key = wire.key_to_wire(self.key)
        self.phase = Phase.WAITING
        self.connector = self.wanted
        self.limit_bytes = 0
        """Credit: payload bytes that the consumer accepts, counted from the flow's first chunk."""
        self.inline_limit_bytes = 0
        self.ledger, self._on_over = ledger, on_over
        self._queue: ReadyQueue[OutletAttempt] | None = None
        self._reader: Connector | None = None
        self._window_bytes: int | None = None
        self._demanded_bytes = 0
        """The credit limit that was demanded on this stream."""
        self._fragments: Iterator[wire.Fragment] | None = None
        self._transfer_id = 0
        self._openings = self._resyncs = 0
        self._silence = _Silence()

    # -- for the outlet

    def has_credit(self, end_bytes: int) -> bool:
        """Returns whether the consumer accepts payload bytes up to `end_bytes`."""
        return self._window_bytes is not None and end_bytes <= self.limit_bytes

    def add(self, sent: SentChunk) -> None:
        """Makes a new chunk pending if the consumer accepts chunks; otherwise it becomes pending when it does."""
        ledger = self.ledger
        if len(ledger.unacked) == 1:
            self._silence.end()
        if self.phase is Phase.OPEN:
            ledger.pending.append(sent)
            self.mark_ready()

    def mark_ready(self) -> None:
        """Has the stream pull from this attempt if there is something to send."""
        if self._queue is not None and self.has_messages:
            self._queue.add(self)

    def supersede(self) -> None:
        """Ends the attempt, because another one takes its place."""
        if not self.is_over:
            self._leave(Phase.FAILED)

    # -- for the link

    @property
    def is_over(self) -> bool:
        """Whether nothing is sent in this attempt any more."""
        return self.phase is Phase.COMMITTED or self.phase is Phase.FAILED

    @property
    def was_opened(self) -> bool:
        """Whether a consumer has accepted the attempt before."""
        return self._window_bytes is not None

    def opening(
        self,
        connector: ConnectorName,
        *,
        reader: Connector | None,
        queue: "ReadyQueue[OutletAttempt]",
        inline_limit_bytes: int,
    ) -> stage_pb2.PutItem:
        """Returns the item that opens the attempt on the stream of `queue`; `reader` is this replica's connector."""
        self._detach()
        self.phase, self._queue = Phase.OPENING, queue
        self._openings += 1
        self.connector, self._reader, self.inline_limit_bytes = connector, reader, inline_limit_bytes
        self._silence.restart()
        opening = stage_pb2.OpenEdge(key=self.wire_key, connector=number_of(connector), opening=self._openings)
        return stage_pb2.PutItem(open=opening)

    def opened(self, reply: stage_pb2.EdgeOpened) -> None:
        """Sends from `next_seq` on, because the consumer accepts the flow."""
        if reply.opening != self._openings or self.phase is not Phase.OPENING:
            # The answer to an earlier OpenEdge, or a repeated one: later messages are under way.
            return
        self.acknowledge(reply.next_seq)
        if self.is_over:
            return
        self.ledger.resend(self._leases)
        self.phase, self._demanded_bytes = Phase.OPEN, 0
        if self._window_bytes is None:
            self._window_bytes = reply.credit_limit_bytes
        self.grant(reply.credit_limit_bytes)
        self.mark_ready()
        self.ledger.changed.fire()

    def reopen(self) -> None:
        """Has the link open the attempt again."""
        if not self.is_over:
            self._detach()
            self._attend(self)

    def resync(self, error: StagemeshError) -> None:
        """Opens the attempt again at the consumer's request; raises InvalidChunkError if that repeats without end."""
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            raise InvalidChunkError(
                f"edge {self.key.edge}: the consumer had it opened again and again at chunk {self.ledger.acked}: "
                f"{error.message}"
            )
        self.reopen()

    def disconnect(self) -> None:
        """Waits to be opened on another stream, because its stream broke."""
        self._detach()

    def grant(self, limit_bytes: int) -> None:
        """Raises the credit limit."""
        if limit_bytes > self.limit_bytes:
            self.limit_bytes = limit_bytes
            self._silence.end()
            self.mark_ready()
            self.ledger.changed.fire()

    def acknowledge(self, next_seq: int) -> None:
        """Counts all chunks below `next_seq` as delivered; raises InvalidChunkError for one that was never sent."""
        if self.ledger.acknowledge(next_seq):
            self._resyncs = 0
            self._silence.end()
            if self.ledger.is_delivered:
                if self.ledger.is_aborted:
                    self.commit()
                self.ledger.changed.fire()

    def commit(self) -> None:
        """Ends the attempt, because the consumer has everything. Raises InvalidChunkError before End is sent."""
        if not self.ledger.ended:
            raise InvalidChunkError(f"edge {self.key.edge}: the consumer committed what has not ended")
        if not self.is_over:
            self.ledger.acked = self.ledger.next_seq
            self._leave(Phase.COMMITTED)
            self._on_over(None)

    def fail(self, error: StagemeshError) -> None:
        """Ends the attempt with an error."""
        if not self.is_over:
            self._leave(Phase.FAILED)
            self._on_over(error)

    def check_silence(self, now_s: float) -> None:
        """Opens the attempt again if its consumer has been silent for long: a message may have been lost."""
        waits = self.ledger.unacked or self.ledger.wanted_bytes or self.phase is not Phase.OPEN or self.ledger.ended
        if self._silence.is_too_long(now_s, waits=bool(waits)):
            self.reopen()

    # -- for the stream

    @property
    def has_messages(self) -> bool:
        """Whether there is something to send now."""
        return self.phase is Phase.OPEN and (self._has_chunk or self._fragments is not None or self._demands_credit)

    @property
    def sends_fragments(self) -> bool:
        """Whether the next chunk travels as fragments, in messages of their own."""
        return self._fragments is not None or (
            self.connector == GRPC and self._has_chunk and bool(self.ledger.pending[0].regions)
        )

    def fill(self, request: stage_pb2.PutChunkRequest, budget_bytes: int) -> int:
        """Adds about `budget_bytes` of items, at least one if there is any; returns their approximate size."""
        used_bytes = 0
        pending = self.ledger.pending
        if self._demands_credit:
            demand = request.items.add().demand
            demand.key.CopyFrom(self.wire_key)
            demand.size_bytes, self._demanded_bytes = self._blocked
        while used_bytes < budget_bytes and self._has_chunk and not self.sends_fragments:
            sent = pending.popleft()
            self._encode(request.items.add().chunk, sent)
            used_bytes += _ITEM_BYTES if sent.regions else _ITEM_BYTES + sent.size_bytes
        return used_bytes

    def take_fragment(self) -> bytes:
        """Returns the next fragment as a whole message; the last one of a chunk is followed by the chunk itself."""
        sent = self.ledger.pending[0]
        assert sent.tensors is not None, "only data is sent as fragments"
        if self._fragments is None:
            self._transfer_id = next(_transfer_ids)
            self._fragments = wire.fragments(
                self.wire_key, sent.tensors, total_bytes=sent.size_bytes, transfer_id=self._transfer_id
            )
        fragment = next(self._fragments)
        if fragment.message.offset + len(fragment.payload) < fragment.message.total_bytes:
            return wire.encode_fragment(fragment)
        self._fragments = None
        self.ledger.pending.popleft()
        rest = stage_pb2.PutChunkRequest()
        self._encode(rest.items.add().chunk, sent)
        return wire.encode_fragment(fragment, rest=rest.SerializeToString())

    # -- inner workings

    @property
    def _has_chunk(self) -> bool:
        """Whether there is credit for the next pending chunk."""
        pending = self.ledger.pending
        return bool(pending) and pending[0].end_bytes <= self.limit_bytes

    @property
    def _blocked(self) -> tuple[int, int]:
        """The size of the next chunk that lacks credit, and the credit limit that it needs; zeros if none does."""
        pending, wanted_bytes = self.ledger.pending, self.ledger.wanted_bytes
        if pending:
            sent = pending[0]
            return (sent.size_bytes, sent.end_bytes) if sent.end_bytes > self.limit_bytes else (0, 0)
        return (wanted_bytes, self.ledger.sent_bytes + wanted_bytes) if wanted_bytes else (0, 0)

    @property
    def _demands_credit(self) -> bool:
        """Whether the next chunk is larger than the consumer's window, and the consumer does not know that yet."""
        size_bytes, end_bytes = self._blocked
        return size_bytes > (self._window_bytes or 0) and end_bytes > self._demanded_bytes

    def _encode(self, chunk: chunk_pb2.Chunk, sent: SentChunk) -> None:
        chunk.key.CopyFrom(self.wire_key)
        chunk.seq = sent.seq
        if sent.tail is not None:
            wire.fill_tail(chunk, sent.tail)
            return
        assert sent.tensors is not None, "a pending chunk is kept"
        assert sent.shape is not None, "data has a shape"
        data = chunk.data
        if not sent.regions:
            wire.fill_inline(data, sent.tensors, sent.shape)
        elif self._reader is None:
            wire.fill_streamed(data, sent.shape, transfer_id=self._transfer_id)
        else:
            sent.lease_id, sent.reader = self._leases.grant(sent.regions), self._reader
            self._reader.expect_reads(1)
            wire.fill_in_arena(data, sent.shape, places=sent.places, lease_id=sent.lease_id)
        if sent.metadata:
            wire.fill_metadata(data, sent.metadata)

    def _detach(self) -> None:
        """Leaves the stream."""
        self.phase, self._fragments = Phase.WAITING, None
        self.ledger.stop_sending()
        if self._queue is not None:
            self._queue.discard(self)
            self._queue = None

    def _leave(self, phase: Phase) -> None:
        """Leaves the stream and the link for good."""
        self._detach()
        self.phase = phase
        self._attend(self)


class _Silence:
    """How long a consumer has been silent, and how long it may be; the limit doubles each time it is reached."""

    def __init__(self) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._since_s, self._limit_s = self._now_s(), _REOPEN_S

    def end(self) -> None:
        """The consumer has answered, or a new message is the first to wait for an answer."""
        self._since_s, self._limit_s = self._now_s(), _REOPEN_S

    def restart(self) -> None:
        """Measures from now on, with the same limit."""
        self._since_s = self._now_s()

    def is_too_long(self, now_s: float, *, waits: bool) -> bool:
        """Returns whether the limit is reached, and then restarts. Silence does not count unless an answer `waits`."""
        is_reached = waits and now_s - self._since_s > self._limit_s
        if is_reached:
            self._limit_s = min(2 * self._limit_s, _MAX_REOPEN_S)
        if is_reached or not waits:
            self._since_s = now_s
        return is_reached
