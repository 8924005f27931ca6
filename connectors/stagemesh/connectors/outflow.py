"""The producing end of a flow: chunk policy, credit, arena, what is retained, and what goes on the wire next."""

from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stagemesh.connectors import wire
from stagemesh.connectors.arena import Arena, Region
from stagemesh.connectors.base import ChunkPolicy, ConnectorName, EdgeKey, FlowUsage, Packet
from stagemesh.connectors.chunking import Chunker
from stagemesh.connectors.errors import CancelledRequestError, InvalidChunkError, StagemeshError
from stagemesh.connectors.pulse import Pulse
from stagemesh.connectors.tensors import dtype_name
from stagemesh.v1 import chunk_pb2, stage_pb2


class Carrier(Protocol):
    """What a flow needs of the link that carries it."""

    inline_limit_bytes: int

    def ready(self, flow: "OutFlow") -> None:
        """The flow has something to send."""

    def lend(self, region: Region) -> int:
        """Holds a region until the consumer returns the lease whose id this is."""
        ...

    def reclaim(self, lease_id: int) -> None:
        """Ends a lease that the consumer cannot hold."""

    def next_transfer_id(self) -> int:
        """An id for a series of pieces."""
        ...

    def retain(self, flow: "OutFlow", sent: "Sent") -> None:
        """A chunk has arrived and is kept only for those who may ask for it again."""

    def forget(self, flow: "OutFlow") -> None:
        """The flow is over."""


@dataclass(eq=False)
class Sent:
    """A chunk that has its number; kept until it is committed, evicted, or the flow is over."""

    seq: int
    packet: Packet | None
    region: Region | None = None
    tail: chunk_pb2.ChunkEnd | chunk_pb2.ChunkAbort | None = None
    lease_id: int = 0

    @property
    def size_bytes(self) -> int:
        """Payload bytes."""
        return self.packet.size_bytes if self.packet else 0


class OutFlow:
    """Implements `Outlet`. Used by one producing task; the link calls the rest, all on one event loop."""

    def __init__(
        self, key: EdgeKey, *, connector: ConnectorName, policy: ChunkPolicy, arena: Arena, carrier: Carrier
    ) -> None:
        self.key = key
        self.wanted = connector
        self.error: StagemeshError | None = None
        self._chunker = Chunker(policy)
        self._arena = arena
        self._carrier = carrier
        self._changed = Pulse()
        self._digest = wire.FlowDigest()
        self._connector: ConnectorName | None = None
        self._open = False
        self._limit_bytes = self._used_bytes = self._window_bytes = 0
        self._demanded_bytes = 0
        self._retained: deque[Sent] = deque()
        self._pending: deque[Sent] = deque()
        self._pieces: Iterator[chunk_pb2.ChunkPiece] | None = None
        self._transfer_id = 0
        self._next_seq = self._acked = 0
        self._ended = False
        self._sent_chunks = self._sent_bytes = 0

    # -- the engine's side

    @property
    def usage(self) -> FlowUsage:
        """What was sent."""
        connector = self._connector or self.wanted
        return FlowUsage(self.key.edge, connector, self._sent_chunks, self._sent_bytes)

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
        if self.error is None and not self._ended:
            self._end(chunk_pb2.ChunkAbort(error=wire.error_to_wire(error)))
            # Whoever still sends is told; the link goes on until the Abort has arrived.
            self.error = CancelledRequestError(f"edge {self.key.edge} was aborted: {error.message}", reason="ABORTED")
            self._changed.fire()

    # -- the link's side

    @property
    def has_items(self) -> bool:
        """Whether `take` would give something."""
        return self._open and (bool(self._pending) or self._pieces is not None)

    def opening(self) -> stage_pb2.PutItem:
        """The item that begins the flow on a new stream."""
        return stage_pb2.PutItem(
            open=stage_pb2.OpenEdge(key=wire.key_to_wire(self.key), connector=wire.connector_to_wire(self.wanted))
        )

    def opened(self, reply: stage_pb2.EdgeOpened) -> None:
        """The consumer takes the flow from `next_seq` on."""
        self._connector = wire.connector_from_wire(reply.connector)
        self.acknowledge(reply.next_seq)
        for sent in self._retained:
            if sent.lease_id and sent.seq >= self._acked:
                self._carrier.reclaim(sent.lease_id)
                sent.lease_id = 0
        self._pending = deque(sent for sent in self._retained if sent.seq >= self._acked)
        self._open, self._demanded_bytes = True, 0
        self._window_bytes = self._window_bytes or reply.credit_limit_bytes
        self.grant(reply.credit_limit_bytes)
        self._carrier.ready(self)

    def disconnected(self) -> None:
        """The stream broke; `opened` comes again with the next one."""
        self._open, self._pieces = False, None

    def grant(self, limit_bytes: int) -> None:
        """The consumer raised the credit."""
        self._limit_bytes = max(self._limit_bytes, limit_bytes)
        self._changed.fire()

    def acknowledge(self, next_seq: int) -> None:
        """All chunks below `next_seq` have arrived."""
        if next_seq > self._next_seq:
            self.fail(InvalidChunkError(f"edge {self.key.edge}: the consumer acknowledged a chunk that was never sent"))
            return
        arrived = [sent for sent in self._retained if self._acked <= sent.seq < next_seq]
        self._acked = max(self._acked, next_seq)
        for sent in arrived:
            self._carrier.retain(self, sent)
        if self._ended and self.error is not None and self._acked == self._next_seq:
            self._close()
        self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """The flow cannot go on: ends whoever waits and lets go of everything."""
        self.error = self.error or error
        self._close()

    def committed(self) -> None:
        """The consumer has all of this flow and needs nothing of it again."""
        self._acked = self._next_seq
        self._close()

    def evict(self, sent: Sent) -> bool:
        """Drops a chunk that has arrived; says whether it was still kept."""
        if not self._retained or self._retained[0] is not sent:
            return False
        self._retained.popleft()
        self._let_go(sent)
        return True

    def take(self, budget_bytes: int) -> list[stage_pb2.PutItem]:
        """The next items for the wire, of about `budget_bytes`, at least one where there is any."""
        items: list[stage_pb2.PutItem] = []
        while budget_bytes > 0 and self.has_items:
            item = self._next_item()
            items.append(item)
            budget_bytes -= item.ByteSize()
        return items

    def retained_from(self, first_seq: int) -> list[Sent] | None:
        """What is kept from `first_seq` on; None when something before what is kept is wanted."""
        oldest = self._retained[0].seq if self._retained else self._next_seq
        return [sent for sent in self._retained if sent.seq >= first_seq] if first_seq >= oldest else None

    @property
    def was_opened(self) -> bool:
        """Whether a consumer has taken the flow before."""
        return self._connector is not None

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

    async def _send_chunk(self, packet: Packet) -> None:
        _check_packet(packet)
        await self._take_credit(packet.size_bytes)
        if packet.size_bytes > self._carrier.inline_limit_bytes:
            region = await self._arena.write(packet.tensors)
            if self.error is not None:
                region.release()
            self._check()
            packet = _in_arena(packet, region)
        else:
            region = None
            packet = Packet({name: tensor.copy() for name, tensor in packet.tensors.items()}, packet.metadata)
        self._digest.add(packet)
        self._enqueue(Sent(self._next_seq, packet, region))
        self._sent_chunks += 1
        self._sent_bytes += packet.size_bytes

    async def _take_credit(self, size_bytes: int) -> None:
        while True:
            self._check()
            if self._window_bytes and self._used_bytes + size_bytes <= self._limit_bytes:
                self._used_bytes += size_bytes
                return
            if self._open and size_bytes > self._window_bytes:
                self._demanded_bytes = size_bytes
                self._carrier.ready(self)
            await self._changed.wait()

    def demand(self) -> stage_pb2.PutItem | None:
        """The demand for more credit than the window, once each time that it is needed."""
        size_bytes, self._demanded_bytes = self._demanded_bytes, 0
        if not size_bytes or not self._open:
            return None
        return stage_pb2.PutItem(demand=stage_pb2.CreditDemand(key=wire.key_to_wire(self.key), size_bytes=size_bytes))

    def _end(self, tail: chunk_pb2.ChunkEnd | chunk_pb2.ChunkAbort) -> None:
        self._ended = True
        self._enqueue(Sent(self._next_seq, None, tail=tail))

    def _enqueue(self, sent: Sent) -> None:
        self._next_seq += 1
        self._retained.append(sent)
        if self._open:
            self._pending.append(sent)
        self._changed.fire()
        self._carrier.ready(self)

    def _next_item(self) -> stage_pb2.PutItem:
        if self._pieces is not None:
            piece = next(self._pieces, None)
            if piece is not None:
                return stage_pb2.PutItem(piece=piece)
            self._pieces = None
            return stage_pb2.PutItem(chunk=self._streamed(self._pending.popleft()))
        sent = self._pending[0]
        packet = sent.packet
        in_pieces = packet is not None and self._connector is ConnectorName.GRPC and sent.size_bytes > wire.PIECE_BYTES
        if packet is not None and in_pieces:
            self._transfer_id = self._carrier.next_transfer_id()
            self._pieces = wire.pieces(self.key, packet, transfer_id=self._transfer_id)
            return self._next_item()
        return stage_pb2.PutItem(chunk=self._encode(self._pending.popleft()))

    def _streamed(self, sent: Sent) -> chunk_pb2.Chunk:
        assert sent.packet is not None, "only data is sent in pieces"
        return wire.streamed_chunk(self.key, sent.seq, sent.packet, transfer_id=self._transfer_id)

    def _encode(self, sent: Sent) -> chunk_pb2.Chunk:
        if sent.packet is None:
            return wire.tail_chunk(self.key, sent.seq, sent.tail)
        if sent.region is None or self._connector is ConnectorName.GRPC:
            return wire.inline_chunk(self.key, sent.seq, sent.packet)
        sent.lease_id = self._carrier.lend(sent.region)
        return wire.shm_chunk(self.key, sent.seq, sent.packet, region=sent.region, lease_id=sent.lease_id)

    def _let_go(self, sent: Sent) -> None:
        sent.packet = None
        if sent.region is not None:
            sent.region.release()

    def _close(self) -> None:
        self._open, self._pieces = False, None
        self._pending.clear()
        while self._retained:
            self._let_go(self._retained.popleft())
        self._changed.fire()
        self._carrier.forget(self)


def _check_packet(packet: Packet) -> None:
    if len(packet.tensors) > wire.MAX_TENSORS:
        raise InvalidChunkError(f"{len(packet.tensors)} tensors in a chunk; at most {wire.MAX_TENSORS} are sent")
    for tensor in packet.tensors.values():
        dtype_name(tensor)
    wire.check_metadata(packet.metadata)


def _in_arena(packet: Packet, region: Region) -> Packet:
    views = {
        name: np.frombuffer(region.view(name, tensor.nbytes), tensor.dtype).reshape(tensor.shape)
        for name, tensor in packet.tensors.items()
    }
    return Packet(views, packet.metadata)
