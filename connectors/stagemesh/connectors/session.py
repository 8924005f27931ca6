"""The consuming end of a PutChunk stream: checks every item before its flow sees it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np

from stagemesh.connectors import shm, wire
from stagemesh.connectors.base import ConnectorName, EdgeKey, Packet
from stagemesh.connectors.errors import (
    InvalidChunkError,
    NotFoundError,
    NotReadyError,
    StagemeshError,
    StaleAttemptError,
)
from stagemesh.connectors.inflow import InFlow
from stagemesh.connectors.pulse import Pulse
from stagemesh.connectors.tensors import Array, checked_layout, read_inline
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2

_log = logging.getLogger(__name__)


class FlowRegistry(Protocol):
    """Where a session finds the flows that this replica expects."""

    def find(self, key: EdgeKey) -> InFlow | None:
        """The flow of that key."""

    def is_complete(self, key: EdgeKey) -> bool:
        """Whether the flow was read to its end."""
        ...

    def attempt_of(self, key: EdgeKey) -> int:
        """The highest attempt expected for the key's request and edge, 0 for none."""
        ...


class LeaseBook:
    """The leases that one incarnation of a producer is owed; outlives its streams."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.held: set[int] = set()
        self._owed: list[int] = []
        self._session: PutSession | None = None

    def attach(self, session: "PutSession | None") -> None:
        """The stream that leases go back over from now on."""
        self._session = session
        self._flush()

    def hold(self, lease_id: int, tensors: list[Array]) -> None:
        """Keeps a lease until the last view of `tensors` is gone."""
        self.held.add(lease_id)
        shm.hold_lease(tensors, lambda: self.give_back_soon(lease_id))

    def give_back_soon(self, lease_id: int) -> None:
        """Returns a lease, from whatever thread dropped the last view."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.give_back, lease_id)

    def give_back(self, lease_id: int) -> None:
        """Returns a lease."""
        self.held.discard(lease_id)
        self._owed.append(lease_id)
        self._flush()

    def _flush(self) -> None:
        if self._session is not None and self._owed:
            release = stage_pb2.LeaseRelease(lease_ids=self._owed)
            self._session.reply(stage_pb2.PutReply(release=release))
            self._owed = []


class _Transfer:
    """The bytes of a chunk that comes in pieces."""

    def __init__(self, total_bytes: int) -> None:
        self.buffer = np.empty(total_bytes, np.uint8)
        self.received_bytes = 0


class PutSession:
    """One stream from one producer."""

    def __init__(self, hello: stage_pb2.Hello, *, flows: FlowRegistry, leases: LeaseBook) -> None:
        self.producer = hello.replica
        self.incarnation = hello.incarnation
        self._registry = flows
        self._leases = leases
        self._arena = shm.attach(hello.arena) if hello.HasField("arena") else None
        self._flows: dict[EdgeKey, InFlow] = {}
        self._transfers: dict[int, tuple[EdgeKey, _Transfer]] = {}
        self._replies: list[stage_pb2.PutReply] = []
        self._changed = Pulse()
        self._done = False
        leases.attach(self)

    @property
    def held_lease_ids(self) -> list[int]:
        """What the producer still lends us."""
        return sorted(self._leases.held)

    @property
    def connectors(self) -> list[ConnectorName]:
        """What this producer and we can use, best first."""
        return [ConnectorName.SHM, ConnectorName.GRPC] if self._arena else [ConnectorName.GRPC]

    def reply(self, reply: stage_pb2.PutReply) -> None:
        """Sends a reply with the next message."""
        self._replies.append(reply)
        self._changed.fire()

    def forget(self, key: EdgeKey) -> None:
        """A flow is over: whatever still comes for it is refused."""
        self._flows.pop(key, None)
        self._drop_transfers(key)

    async def replies(self) -> AsyncIterator[stage_pb2.PutChunkResponse]:
        """The messages for the producer, each with all that has come up since the last one."""
        while not self._done or self._replies:
            if not self._replies:
                await self._changed.wait()
                continue
            replies, self._replies = self._replies, []
            yield stage_pb2.PutChunkResponse(replies=replies)

    async def read(self, requests: AsyncIterator[stage_pb2.PutChunkRequest]) -> None:
        """Takes items until the producer ends the stream."""
        try:
            async for request in requests:
                for item in request.items:
                    self._take(item)
        finally:
            self._done = True
            self._changed.fire()

    def close(self) -> None:
        """The stream is over: its flows wait for another one."""
        self._leases.attach(None)
        for flow in self._flows.values():
            flow.detach(self)
        self._flows.clear()
        self._transfers.clear()

    # -- items

    def _take(self, item: stage_pb2.PutItem) -> None:
        match item.WhichOneof("item"):
            case "open":
                self._guarded(item.open.key, lambda: self._open(item.open))
            case "chunk":
                self._guarded(item.chunk.key, lambda: self._chunk(item.chunk))
            case "piece":
                self._guarded(item.piece.key, lambda: self._piece(item.piece))
            case "demand":
                self._guarded(item.demand.key, lambda: self._flow(item.demand.key).demand(item.demand.size_bytes))
            case _:
                _log.warning("replica %s sent an item of an unknown kind", self.producer)

    def _guarded(self, message: chunk_pb2.EdgeKey, work: "_Work") -> None:
        """Runs `work`; what it raises ends the one flow that the item belongs to."""
        try:
            work()
        except StagemeshError as exc:
            key = wire.key_from_wire(message)
            flow = self._flows.pop(key, None)
            exc.located(edge=key.edge, request_id=key.request_id, replica=self.producer)
            if flow is not None:
                flow.refuse(exc)
            else:
                rejected = stage_pb2.EdgeRejected(key=message, error=wire.error_to_wire(exc))
                self.reply(stage_pb2.PutReply(rejected=rejected))

    def _flow(self, message: chunk_pb2.EdgeKey) -> InFlow:
        key = wire.key_from_wire(message)
        flow = self._flows.get(key)
        if flow is None:
            raise NotFoundError(f"edge {key.edge} of request {key.request_id} is not open here", reason="UNKNOWN_FLOW")
        return flow

    def _open(self, message: stage_pb2.OpenEdge) -> None:
        key = wire.key_from_wire(message.key)
        if self._registry.is_complete(key):
            self.reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=message.key)))
            return
        flow = self._registry.find(key)
        if flow is None or flow.producer != self.producer:
            if key.attempt < self._registry.attempt_of(key):
                raise StaleAttemptError(f"attempt {key.attempt} of edge {key.edge} has been replaced")
            raise NotFoundError(
                f"request {key.request_id} expects nothing from {self.producer} on edge {key.edge}",
                reason="UNKNOWN_FLOW",
            )
        connector = self._choose(wire.connector_from_wire(message.connector), edge=key.edge)
        self._flows[key] = flow
        flow.attach(self)
        opened = stage_pb2.EdgeOpened(
            key=message.key,
            next_seq=flow.next_seq,
            credit_limit_bytes=flow.limit_bytes,
            connector=wire.connector_to_wire(connector),
        )
        self.reply(stage_pb2.PutReply(opened=opened))

    def _choose(self, wanted: ConnectorName, *, edge: str) -> ConnectorName:
        if wanted is ConnectorName.AUTO:
            return self.connectors[0]
        if wanted not in self.connectors:
            usable = ", ".join(name.value for name in self.connectors)
            raise NotReadyError(
                f"edge {edge} asks for connector {wanted.value}, which {self.producer} and this replica do not share; "
                f"they share {usable}: place both on one host or set `connector: auto`",
                reason="CONNECTOR_UNAVAILABLE",
            )
        return wanted

    def _chunk(self, chunk: chunk_pb2.Chunk) -> None:
        try:
            flow = self._flow(chunk.key)
            due = flow.check_seq(chunk.seq)
            packet = self._data(flow, chunk.data) if due and chunk.HasField("data") else None
        except StagemeshError:
            self._give_back(chunk)
            raise
        if not due:
            self._give_back(chunk)
            return
        match chunk.WhichOneof("content"):
            case "data" if packet is not None:
                flow.deliver(packet)
            case "end":
                flow.deliver_end(chunk.end)
            case "abort":
                flow.deliver_abort(wire.error_from_wire(chunk.abort.error))
            case _:
                raise InvalidChunkError(f"chunk {chunk.seq} of edge {flow.key.edge} is empty")

    def _data(self, flow: InFlow, data: chunk_pb2.ChunkData) -> Packet:
        flow.check_room(data.size_bytes)
        return self._decode(data)

    def _give_back(self, chunk: chunk_pb2.Chunk) -> None:
        if chunk.data.lease_id:
            self._leases.give_back(chunk.data.lease_id)

    def _decode(self, data: chunk_pb2.ChunkData) -> Packet:
        if len(data.tensors) > wire.MAX_TENSORS:
            raise InvalidChunkError(f"{len(data.tensors)} tensors in a chunk; at most {wire.MAX_TENSORS} are taken")
        transfers: dict[int, _Transfer] = {}
        tensors = {message.name: self._tensor(message, data, transfers) for message in data.tensors}
        packet = Packet(tensors, wire.metadata_from_wire(data.metadata))
        if len(tensors) != len(data.tensors) or packet.size_bytes != data.size_bytes:
            raise InvalidChunkError("a chunk's tensors share a name or do not make the size that it claims")
        for transfer_id in transfers:
            del self._transfers[transfer_id]
        leased = [tensors[m.name] for m in data.tensors if m.WhichOneof("location") == "shm"]
        if leased:
            self._leases.hold(data.lease_id, leased)
        elif data.lease_id:
            self._leases.give_back(data.lease_id)
        return packet

    def _tensor(
        self, message: tensor_pb2.Tensor, data: chunk_pb2.ChunkData, transfers: "dict[int, _Transfer]"
    ) -> Array:
        match message.WhichOneof("location"):
            case "inline":
                return read_inline(message)
            case "shm" if self._arena is not None and data.lease_id:
                return self._arena.view(message)
            case "streamed":
                return self._streamed(message, transfers)
            case None:
                dtype, shape = checked_layout(message, size_bytes=0)
                return np.empty(shape, dtype)
            case other:
                raise InvalidChunkError(f"tensor {message.name!r} comes by {other}, which was not agreed on")

    def _streamed(self, message: tensor_pb2.Tensor, transfers: "dict[int, _Transfer]") -> Array:
        place = message.streamed
        _, transfer = self._transfers.get(place.transfer_id, (None, None))
        if transfer is None or transfer.received_bytes < len(transfer.buffer):
            raise InvalidChunkError(f"tensor {message.name!r} came before all of its pieces")
        dtype, shape = checked_layout(message, size_bytes=place.size_bytes)
        if place.offset + place.size_bytes > len(transfer.buffer):
            raise InvalidChunkError(f"tensor {message.name!r} lies outside its transfer")
        transfers[place.transfer_id] = transfer
        return transfer.buffer[place.offset : place.offset + place.size_bytes].view(dtype).reshape(shape)

    def _piece(self, piece: chunk_pb2.ChunkPiece) -> None:
        flow = self._flow(piece.key)
        key, transfer = self._transfers.get(piece.transfer_id, (flow.key, None))
        if transfer is None:
            self._drop_transfers(flow.key)
            flow.check_room(piece.total_bytes)
            transfer = _Transfer(piece.total_bytes)
            self._transfers[piece.transfer_id] = (flow.key, transfer)
        payload = piece.payload
        end = piece.offset + len(payload)
        if key != flow.key or piece.offset != transfer.received_bytes or end > len(transfer.buffer):
            raise InvalidChunkError(f"a piece of edge {flow.key.edge} at {piece.offset} does not fit its transfer")
        transfer.buffer[piece.offset : end] = np.frombuffer(payload, np.uint8)
        transfer.received_bytes = end

    def _drop_transfers(self, key: EdgeKey) -> None:
        """One transfer a flow: a new one means that the one before was given up."""
        for transfer_id in [number for number, (owner, _) in self._transfers.items() if owner == key]:
            del self._transfers[transfer_id]


class _Work(Protocol):
    def __call__(self) -> None: ...
