"""The producing end of a flow: chunk policy, credit, arena, what is retained, and what goes on the wire next."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from typing import Protocol

from stagemesh.common.connector_descriptors import GRPC, ConnectorName, number_of
from stagemesh.common.errors import CancelledRequestError, InvalidChunkError, StagemeshError
from stagemesh.common.notifier import Notifier
from stagemesh.common.tensors import Tensors
from stagemesh.connectors.arena.arena import Arena, MemoryAccount, Region, Written
from stagemesh.connectors.base import ArenaRange, Connector
from stagemesh.connectors.edge import ChunkPolicy, EdgeKey, FlowStatus, FlowUsage, Packet
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.flow.sent_chunk import SentChunk
from stagemesh.connectors.stream import fragment_codec, wire
from stagemesh.v1 import chunk_pb2, stage_pb2

_REOPEN_S, _MAX_REOPEN_S = 2.0, 30.0
"""How long a flow hears nothing before it is opened again, at first and at most."""
MAX_RESYNCS = 10
"""How often a consumer may have a flow opened again while nothing more of it arrives."""
BULK_BYTES = 256 << 10
"""A flow with chunks larger than this goes apart where they travel in pieces."""
_NOWHERE = ArenaRange(0, 0, 0)
_ITEM_BYTES = 200
"""About what a chunk takes on the wire without its payload."""


class Carrier(Protocol):
    """What a flow needs of the link that carries it."""

    inline_limit_bytes: int

    def ready(self, flow: "OutletAttempt") -> None:
        """The flow has something to send."""

    def reopen(self, flow: "OutletAttempt") -> None:
        """The flow must be opened (again) before it goes on."""

    def lend(self, regions: Sequence[Region]) -> int:
        """Holds regions until the consumer returns the lease whose id this is."""
        ...

    def reclaim(self, lease_id: int) -> None:
        """Ends a lease that the consumer cannot hold."""

    def next_transfer_id(self) -> int:
        """An id for a series of pieces."""
        ...

    def retain(self, flow: "OutletAttempt", sent: SentChunk) -> None:
        """A chunk has arrived and is kept only for those who may ask for it again."""

    def forget(self, flow: "OutletAttempt") -> None:
        """The flow is over."""


class OutletAttempt:
    """Implements `Outlet`. Used by one producing task; the link calls the rest, all on one event loop."""

    def __init__(
        self, key: EdgeKey, *, wanted: ConnectorName, policy: ChunkPolicy, arena: Arena, carrier: Carrier
    ) -> None:
        self.key = key
        self.wire_key = wire.key_to_wire(key)
        self.wanted = wanted
        self.error: StagemeshError | None = None
        self.on_over: Callable[[StagemeshError | None], bool] | None = None
        """Told that the flow has failed, or (None) is committed; True has a failed one keep its chunks."""
        self._chunker = Chunker(policy)
        self._arena = arena
        self._account = MemoryAccount()
        self._carrier = carrier
        self._changed = Notifier()
        self._digest = wire.FlowDigest()
        self._shape: wire.PacketShape | None = None
        self._connector = wanted
        self._reader: Connector | None = None
        self._was_opened = self._open = self._left = False
        self._openings = self._resyncs = 0
        self._limit_bytes = self._used_bytes = self._window_bytes = 0
        self._wanted_bytes = self._demanded_bytes = 0
        self._kept: deque[SentChunk] = deque()
        self._unacked: deque[SentChunk] = deque()
        self._pending: deque[SentChunk] = deque()
        self._pieces: Iterator[wire.Piece] | None = None
        self._transfer_id = 0
        self._next_seq = self._acked = 0
        self._ended = False
        self.is_bulk = False
        """Whether it has large chunks, to go beside those of other flows where they travel in pieces."""
        self._sent_chunks = self._sent_bytes = 0
        self._silence_s = _REOPEN_S
        self._now_s = asyncio.get_running_loop().time
        self._heard_s = self._now_s()

    # -- the engine's side

    @property
    def usage(self) -> FlowUsage:
        """What was sent."""
        return FlowUsage(self.key.edge, self._connector, self._sent_chunks, self._sent_bytes)

    @property
    def standing(self) -> FlowStatus:
        """See `Outlet`."""
        return FlowStatus(
            edge=self.key.edge,
            connector=self._connector,
            connected=self._open,
            chunks=self._next_seq,
            waiting_chunks=len(self._unacked),
            waiting_bytes=sum(sent.size_bytes for sent in self._unacked),
            credit_bytes=max(0, self._limit_bytes - self._used_bytes),
            wanted_bytes=self._wanted_bytes,
            ended=self._ended,
        )

    async def send(self, packet: Packet) -> None:
        """See `Outlet`."""
        for chunk in self._chunker.push(packet):
            await self._send_chunk(chunk)

    async def finish(self) -> None:
        """See `Outlet`."""
        for chunk in self._chunker.finish():
            await self._send_chunk(chunk)
        self._end(self._digest.end())
        while self._acked < self._next_seq:
            self._check()
            await self._changed.wait()

    async def abort(self, error: StagemeshError) -> None:
        """See `Outlet`."""
        self.break_off(error)

    def break_off(self, error: StagemeshError) -> None:
        """What `abort` does; it waits for nothing."""
        if self.error is None and not self._ended:
            self._end(chunk_pb2.ChunkAbort(error=wire.error_to_wire(error)))
            # Whoever still sends is told; the link goes on until the Abort has arrived.
            self.error = CancelledRequestError(f"edge {self.key.edge} was aborted: {error.message}", reason="ABORTED")
            self._changed.fire()

    # -- the link's side

    @property
    def has_items(self) -> bool:
        """Whether there is something to send."""
        return self._open and (bool(self._pending) or self._pieces is not None or self._demanded_bytes > 0)

    @property
    def is_open(self) -> bool:
        """Whether the consumer has taken the flow on the stream that is there."""
        return self._open

    @property
    def in_pieces(self) -> bool:
        """Whether the next chunk travels as pieces, in messages of their own."""
        return self._pieces is not None or (
            self._connector == GRPC and bool(self._pending) and bool(self._pending[0].regions)
        )

    def opening(self, connector: ConnectorName, reader: Connector | None) -> stage_pb2.PutItem:
        """The item that opens the flow, to go on by `connector`; `reader` is this replica's end of it."""
        self._open, self._pieces = False, None
        self._openings += 1
        self._connector, self._reader = connector, reader
        self._heard_s = self._now_s()
        opening = stage_pb2.OpenEdge(key=self.wire_key, connector=number_of(connector), opening=self._openings)
        return stage_pb2.PutItem(open=opening)

    def opened(self, reply: stage_pb2.EdgeOpened) -> None:
        """The consumer takes the flow from `next_seq` on."""
        if reply.opening != self._openings or self._open:
            # The answer to an earlier OpenEdge, or a repeat: what was sent since then is on its way.
            return
        self.acknowledge(reply.next_seq)
        for sent in self._unacked:
            sent.arrived()
            if sent.lease_id:
                self._carrier.reclaim(sent.lease_id)
                sent.lease_id = 0
        self._pending, self._pieces = deque(self._unacked), None
        self._open = self._was_opened = True
        self._window_bytes = self._window_bytes or reply.credit_limit_bytes
        self._demanded_bytes = self._wanted_bytes
        self.grant(reply.credit_limit_bytes)
        self._carrier.ready(self)

    def resynced(self, error: StagemeshError) -> None:
        """The consumer wants the flow opened again; raises InvalidChunkError where it does nothing else."""
        self._resyncs += 1
        if self._resyncs > MAX_RESYNCS:
            raise InvalidChunkError(
                f"edge {self.key.edge}: the consumer had it opened again and again at chunk {self._acked}: "
                f"{error.message}"
            )

    def disconnected(self) -> None:
        """The stream broke; `opened` comes again with the next one."""
        self._open, self._pieces = False, None
        for sent in self._unacked:
            sent.arrived()

    def grant(self, limit_bytes: int) -> None:
        """The consumer raised the credit."""
        if limit_bytes > self._limit_bytes:
            self._limit_bytes = limit_bytes
            self._heard()
            self._changed.fire()

    def acknowledge(self, next_seq: int) -> None:
        """All chunks below `next_seq` have arrived."""
        if next_seq > self._next_seq:
            self.fail(InvalidChunkError(f"edge {self.key.edge}: the consumer acknowledged a chunk that was never sent"))
            return
        if next_seq <= self._acked:
            return
        self._acked, self._resyncs = next_seq, 0
        while self._unacked and self._unacked[0].seq < next_seq:
            sent = self._unacked.popleft()
            sent.arrived()
            self._kept.append(sent)
            self._carrier.retain(self, sent)
        self._heard()
        if self._ended and self._acked == self._next_seq:
            if self.error is not None:
                self._close()
            self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """The flow cannot go on: ends whoever waits and lets go of everything, unless that is kept for another flow."""
        if self._left:
            return
        is_first, self.error = self.error is None, self.error or error
        if is_first and self.on_over is not None and self.on_over(error):
            self._leave()
        else:
            self._close()

    def committed(self) -> None:
        """The consumer has all of this flow and needs nothing of it again."""
        self._acked = self._next_seq
        on_over = self.on_over
        self._close()
        if on_over is not None:
            on_over(None)

    @property
    def keeps_all(self) -> bool:
        """Whether every chunk that has its number is still here."""
        return not self._sent_chunks or self.retained_from(0) is not None

    def surrender(self, error: StagemeshError) -> list[SentChunk]:
        """Ends the flow with `error`, and returns its data chunks for another; their memory is the caller's then."""
        self.error = self.error or error
        chunks = [sent for sent in (*self._kept, *self._unacked) if sent.tail is None]
        for sent in chunks:
            sent.arrived()
        self._kept.clear()
        self._unacked.clear()
        self._close()
        return chunks

    def let_go(self) -> None:
        """Drops what a failed flow kept."""
        self.on_over = None
        for kept in (self._kept, self._unacked):
            while kept:
                kept.popleft().let_go()

    def keeps(self, sent: SentChunk) -> bool:
        """Whether a chunk that has arrived is still kept."""
        return bool(self._kept) and sent.seq >= self._kept[0].seq

    def evict(self, sent: SentChunk) -> bool:
        """Drops a chunk that has arrived, and those before it; says whether it was still kept."""
        if not self.keeps(sent):
            return False
        while self._kept and self._kept[0].seq <= sent.seq:
            self._kept.popleft().let_go()
        return True

    def fill(self, request: stage_pb2.PutChunkRequest, budget_bytes: int) -> int:
        """Adds items, about `budget_bytes` of them and at least one where there is any; returns their size."""
        used_bytes = 0
        if self._demanded_bytes:
            demand = request.items.add().demand
            demand.key.CopyFrom(self.wire_key)
            demand.size_bytes, self._demanded_bytes = self._demanded_bytes, 0
        while self._pending and used_bytes < budget_bytes and not self.in_pieces:
            sent = self._pending.popleft()
            self._encode(request.items.add().chunk, sent)
            used_bytes += _ITEM_BYTES if sent.regions else _ITEM_BYTES + sent.size_bytes
        return used_bytes

    def take_piece(self) -> bytes:
        """The next piece as a whole message, the last one of a chunk together with the chunk."""
        sent = self._pending[0]
        assert sent.tensors is not None, "only data is sent in pieces"
        if self._pieces is None:
            self._transfer_id = self._carrier.next_transfer_id()
            self._pieces = wire.pieces(
                self.wire_key, sent.tensors, total_bytes=sent.size_bytes, transfer_id=self._transfer_id
            )
        piece = next(self._pieces)
        if piece.message.offset + len(piece.payload) < piece.message.total_bytes:
            return fragment_codec.encode(piece.message, piece.payload)
        self._pieces = None
        self._pending.popleft()
        rest = stage_pb2.PutChunkRequest()
        self._encode(rest.items.add().chunk, sent)
        return fragment_codec.encode(piece.message, piece.payload, rest=rest.SerializeToString())

    def retained_from(self, first_seq: int) -> list[SentChunk] | None:
        """What is kept from `first_seq` on; None when something before what is kept is wanted."""
        oldest = self._kept[0].seq if self._kept else self._acked
        return (
            [sent for sent in (*self._kept, *self._unacked) if sent.seq >= first_seq] if first_seq >= oldest else None
        )

    def check_silence(self, now_s: float) -> None:
        """Has the flow opened again when its consumer has said nothing for long: a message may have been lost."""
        waits = self._unacked or self._wanted_bytes or not self._open or self._ended
        if not waits:
            self._heard_s = now_s
        elif now_s - self._heard_s > self._silence_s:
            self._heard_s, self._silence_s = now_s, min(2 * self._silence_s, _MAX_REOPEN_S)
            self._carrier.reopen(self)

    @property
    def was_opened(self) -> bool:
        """Whether a consumer has taken the flow before."""
        return self._was_opened

    @property
    def ended(self) -> bool:
        """Whether End or Abort has its number."""
        return self._ended

    async def changed(self) -> None:
        """Returns when something about the flow has changed."""
        await self._changed.wait()

    # -- inner workings

    def _check(self) -> None:
        if self.error is not None:
            raise copy(self.error)

    def _heard(self) -> None:
        self._heard_s, self._silence_s = self._now_s(), _REOPEN_S

    async def _send_chunk(self, packet: Packet) -> None:
        self._check()
        self._shape = shape = wire.shape_of(packet, last=self._shape)
        if packet.metadata:
            wire.check_metadata(packet.metadata)
        size_bytes = shape.size_bytes
        if not self._take_credit(size_bytes):
            await self._credit_granted(size_bytes)
        if size_bytes <= self._carrier.inline_limit_bytes:
            copies = {name: tensor.copy() for name, tensor in packet.tensors.items()}
            sent = SentChunk(self._next_seq, shape, copies, packet.metadata)
        else:
            sent = self._placed(packet, shape) or await self._written(packet, shape)
        self._digest.add(shape)
        self._enqueue(sent)
        if size_bytes > BULK_BYTES and not self.is_bulk:
            self.is_bulk = True
            if self._connector == GRPC:
                self._carrier.reopen(self)
        self._sent_chunks += 1
        self._sent_bytes += size_bytes

    def _take_credit(self, size_bytes: int) -> bool:
        granted = self._was_opened and self._used_bytes + size_bytes <= self._limit_bytes
        if granted:
            self._used_bytes += size_bytes
        return granted

    async def _credit_granted(self, size_bytes: int) -> None:
        """Waits for credit, and asks for more than the window where that can never do."""
        self._wanted_bytes = size_bytes
        try:
            while not self._take_credit(size_bytes):
                if self._open and size_bytes > self._window_bytes:
                    self._demanded_bytes = size_bytes
                    self._carrier.ready(self)
                await self._changed.wait()
                self._check()
        finally:
            self._wanted_bytes = self._demanded_bytes = 0

    def _placed(self, packet: Packet, shape: wire.PacketShape) -> SentChunk | None:
        """The chunk, where its tensors lie in the arena already or there is room for them at once."""
        found = self._find(packet)
        if found is not None:
            for region in found:
                region.retain()
            return SentChunk(
                self._next_seq, shape, packet.tensors, packet.metadata, tuple(found), self._places(packet.tensors)
            )
        written = self._arena.try_write(packet.tensors, self._account, shape.layout)
        return None if written is None else self._sent(written, packet, shape)

    async def _written(self, packet: Packet, shape: wire.PacketShape) -> SentChunk:
        written = await self._arena.write(packet.tensors, self._account, shape.layout)
        if self.error is not None:
            written.region.release()
        self._check()
        return self._sent(written, packet, shape)

    def _find(self, packet: Packet) -> Collection[Region] | None:
        """The regions of a packet that lies in the arena; None for one that does not, or not all of it."""
        regions: dict[Region, None] = {}
        for tensor in packet.tensors.values():
            if tensor.nbytes:
                found = self._arena.find(tensor)
                if found is None:
                    return None
                regions[found.region] = None
        return regions

    def _places(self, tensors: Tensors) -> list[ArenaRange]:
        """Of each tensor of a packet that lies in the arena."""
        found = [self._arena.find(tensor) for tensor in tensors.values()]
        return [
            ArenaRange(at.offset, tensor.nbytes, at.region.generation) if at else _NOWHERE
            for at, tensor in zip(found, tensors.values(), strict=True)
        ]

    def _sent(self, written: Written, packet: Packet, shape: wire.PacketShape) -> SentChunk:
        region, tensors, offsets = written
        generation = region.generation
        places = [ArenaRange(offset, field[3], generation) for offset, field in zip(offsets, shape.fields, strict=True)]
        return SentChunk(self._next_seq, shape, tensors, packet.metadata, (region,), places)

    def _end(self, tail: wire.Tail) -> None:
        self._ended = True
        self._enqueue(SentChunk(self._next_seq, tail=tail))

    def _enqueue(self, sent: SentChunk) -> None:
        self._next_seq += 1
        if not self._unacked:
            self._heard()
        self._unacked.append(sent)
        if self._open:
            self._pending.append(sent)
            self._carrier.ready(self)
        self._changed.fire()

    def _encode(self, chunk: chunk_pb2.Chunk, sent: SentChunk) -> None:
        chunk.key.CopyFrom(self.wire_key)
        chunk.seq = sent.seq
        if sent.tail is not None:
            wire.fill_tail(chunk, sent.tail)
            return
        assert sent.tensors is not None, "a chunk that waits is kept"
        assert sent.shape is not None, "data has a shape"
        data = chunk.data
        if not sent.regions:
            wire.fill_inline(data, sent.tensors, sent.shape)
        elif self._reader is None:
            wire.fill_streamed(data, sent.shape, transfer_id=self._transfer_id)
        else:
            sent.lease_id, sent.reader = self._carrier.lend(sent.regions), self._reader
            self._reader.expect_reads(1)
            wire.fill_in_arena(data, sent.shape, places=sent.places, lease_id=sent.lease_id)
        if sent.metadata:
            wire.fill_metadata(data, sent.metadata)

    def _close(self) -> None:
        self.let_go()
        self._leave()

    def _leave(self) -> None:
        """Nothing goes over the link any more."""
        self._left = True
        self._open, self._pieces = False, None
        self._pending.clear()
        for sent in self._unacked:
            sent.arrived()
        self._changed.fire()
        self._carrier.forget(self)
