"""The consuming end of one lane: checks every item before its flow sees it."""

import asyncio
import logging
import os
from collections.abc import Callable
from copy import copy
from typing import Protocol

from google.protobuf.message import DecodeError

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, name_of
from stagemesh.common.errors import (
    InvalidChunkError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    StagemeshError,
    StaleAttemptError,
    UnavailableError,
)
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import FetchingReader, InPlaceReader
from stagemesh.connectors.edge import EdgeKey, Packet
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.stream import chunk_decoding, fragment_codec, wire
from stagemesh.connectors.stream.fragment_assembly import FragmentAssembler
from stagemesh.connectors.stream.local_socket import DeathWatch
from stagemesh.connectors.stream.producer_state import ProducerState
from stagemesh.rpc.message_streams import MessageStream
from stagemesh.v1 import chunk_pb2, stage_pb2

_log = logging.getLogger(__name__)

_CLOSING_S = 1.0


class Consumer(Protocol):
    """What a session needs of the data plane."""

    def greet(self, hello: stage_pb2.Hello) -> ProducerState:
        """The producer that introduces itself; raises what it is refused with."""
        ...

    def welcome(self, peer: ProducerState) -> stage_pb2.Welcome:
        """The answer to it."""
        ...

    def landing(self) -> Arena | None:
        """Warm memory for chunks that come in pieces; None while there is none."""

    def find(self, key: EdgeKey) -> InletAttempt | None:
        """The flow of that key."""

    def is_complete(self, key: EdgeKey) -> bool:
        """Whether the flow was read to its end."""
        ...

    def attempt_of(self, key: EdgeKey) -> int:
        """The highest attempt expected for the key's request and edge, 0 for none."""
        ...


class ConsumerSession:
    """Implements `LaneUser` and a flow's `Session`: one stream from one producer."""

    def __init__(
        self, consumer: Consumer, *, arena_fd: int | None = None, on_closed: Callable[["ConsumerSession"], None]
    ) -> None:
        self._consumer = consumer
        self.watch: DeathWatch | None = None
        """On the producer's process, where it is on this host. Goes over to the producer with its Hello."""
        self._arena_fd = arena_fd
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._lane: MessageStream | None = None
        self._peer: ProducerState | None = None
        self._flows: dict[EdgeKey, InletAttempt] = {}
        self._moved: set[EdgeKey] = set()
        self._transfers = FragmentAssembler(consumer.landing)
        self._meetings: set[asyncio.Task[None]] = set()
        self._met: set[ConnectorName] = set()
        """Connectors that were agreed on over this stream; the reader of one that failed is gone."""
        self._response = stage_pb2.PutChunkResponse()
        self._touched: dict[InletAttempt, None] = {}
        self._released: list[int] = []
        self._flush_is_due = False
        self._over: asyncio.Future[None] = self._loop.create_future()

    def begin(self, lane: MessageStream) -> None:
        """The lane that it is the user of."""
        self._lane = lane

    @property
    def peer(self) -> ProducerState | None:
        """The producer, once it has introduced itself."""
        return self._peer

    async def close(self, error: StagemeshError | None = None) -> None:
        """Ends the stream."""
        if self._lane is not None:
            self._lane.close(error)
            await asyncio.wait((self._over,), timeout=_CLOSING_S)
        meetings = list(self._meetings)
        for meeting in meetings:
            meeting.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)

    # -- for the lane

    def received(self, data: bytes) -> None:
        """See `LaneUser`."""
        parts = fragment_codec.decode(data)
        try:
            request = stage_pb2.PutChunkRequest.FromString(data if parts is None else bytes(parts.rest))
        except DecodeError as exc:
            raise InvalidRequestError("the producer sent what is no message of the contract") from exc
        if self._peer is None:
            self._greet(request)
        if parts is not None:
            self._guarded(parts.piece.key, self._piece, parts.piece, parts.payload)
        for item in request.items:
            self._take(item)

    def writable(self) -> None:
        """See `LaneUser`."""
        self._flush()

    def closed(self, error: StagemeshError | None) -> None:
        """See `LaneUser`: the flows wait for another stream."""
        if error is not None:
            _log.info("the stream of %s ended: %s", self._name, error.message)
        if self._peer is not None:
            self._peer.detach(self)
        for flow in self._flows.values():
            flow.detach(self)
        self._flows.clear()
        self._transfers.clear()
        self._lane = None
        if self._arena_fd is not None:
            os.close(self._arena_fd)
            self._arena_fd = None
        if self.watch is not None:
            self.watch.close()
        if not self._over.done():
            self._over.set_result(None)
        self._on_closed(self)

    # -- for flows and leases

    def touch(self, flow: InletAttempt) -> None:
        """See `Session`."""
        self._touched[flow] = None
        self._flush_soon()

    def reply(self, reply: stage_pb2.PutReply) -> None:
        """See `Session`."""
        self._response.replies.append(reply)
        self._flush_soon()

    def release(self, lease_ids: list[int]) -> None:
        """See `ReleaseSink`."""
        self._released.extend(lease_ids)
        self._flush_soon()

    def forget(self, key: EdgeKey, *, moved: bool) -> None:
        """See `Session`: what still comes of a moved flow is ignored, of one that is over refused."""
        self._flows.pop(key, None)
        self._transfers.drop(key)
        if moved:
            self._moved.add(key)

    # -- replies

    def _flush_soon(self) -> None:
        """Replies of one turn of the event loop go out together."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._lane is None or not self._lane.is_writable:
            return
        for flow in self._touched:
            flow.report(self._response)
        self._touched.clear()
        if self._released:
            self._response.replies.add().release.lease_ids.extend(self._released)
            self._released.clear()
        if self._response.replies:
            response, self._response = self._response, stage_pb2.PutChunkResponse()
            self._lane.write(response.SerializeToString())

    # -- items

    @property
    def _name(self) -> str:
        return f"replica {self._peer.replica}" if self._peer else "a producer that did not say its name"

    def _greet(self, request: stage_pb2.PutChunkRequest) -> None:
        if not request.HasField("hello"):
            raise InvalidRequestError("the first message of PutChunk must hold Hello", reason="NO_HELLO")
        if not request.hello.replica or not request.hello.incarnation:
            raise InvalidRequestError("Hello must say the producer's name and incarnation", reason="NO_HELLO")
        self._peer = peer = self._consumer.greet(request.hello)
        welcome = self._consumer.welcome(peer)
        assert self._lane is not None, "a session begins before it receives"
        self._lane.write(stage_pb2.PutChunkResponse(welcome=welcome).SerializeToString())
        peer.attach(self)
        if self.watch is not None:
            peer.watched_by(self.watch)
            self.watch = None

    def _take(self, item: stage_pb2.PutItem) -> None:
        match item.WhichOneof("item"):
            case "chunk":
                chunk = item.chunk
                self._guarded(chunk.key, self._chunk, chunk)
            case "open":
                self._guarded(item.open.key, self._open, item.open)
            case "piece":
                piece = item.piece
                self._guarded(piece.key, self._piece, piece, memoryview(piece.payload))
            case "demand":
                self._guarded(item.demand.key, self._demand, item.demand)
            case "offer":
                self._offered(item.offer)
            case _:
                _log.warning("%s sent an item of an unknown kind", self._name)

    def _guarded(self, message: chunk_pb2.EdgeKey, work: Callable[..., None], *item: object) -> None:
        """Does `work` with an item; what it raises ends the one flow that the item belongs to."""
        try:
            work(*item)
        except StagemeshError as exc:
            key = wire.key_from_wire(message)
            exc.located(edge=key.edge, request_id=key.request_id, replica=self._name)
            flow = self._flows.pop(key, None)
            if flow is not None:
                flow.refuse(exc)
            else:
                rejected = stage_pb2.EdgeRejected(key=message, error=wire.error_to_wire(exc))
                self.reply(stage_pb2.PutReply(rejected=rejected))

    def _flow(self, message: chunk_pb2.EdgeKey) -> InletAttempt | None:
        """The flow that an item belongs to; None where the item is to be ignored."""
        key = wire.key_from_wire(message)
        flow = self._flows.get(key)
        if flow is not None:
            return None if flow.resyncing else flow
        if key in self._moved:
            return None
        if self._consumer.is_complete(key):
            self.reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=message)))
            return None
        expected = self._expected(key)
        # Its OpenEdge was lost.
        expected.open(self, incarnation=self._producer.incarnation, connector=GRPC)
        self._flows[key] = expected
        expected.resync(InvalidChunkError(f"edge {key.edge} was not opened", reason="NOT_OPENED"))
        return None

    @property
    def _producer(self) -> ProducerState:
        assert self._peer is not None, "items come after Hello"
        return self._peer

    def _expected(self, key: EdgeKey) -> InletAttempt:
        flow = self._consumer.find(key)
        if flow is None or flow.producer != self._producer.replica:
            if key.attempt < self._consumer.attempt_of(key):
                raise StaleAttemptError(f"attempt {key.attempt} of edge {key.edge} has been replaced")
            raise NotFoundError(
                f"request {key.request_id} expects nothing from {self._producer.replica} on edge {key.edge}",
                reason="UNKNOWN_FLOW",
            )
        if flow.incarnation not in {"", self._producer.incarnation}:
            raise StaleAttemptError(
                f"edge {key.edge} belongs to another incarnation of {flow.producer}", reason="STALE_INCARNATION"
            )
        if flow.error is not None:
            raise copy(flow.error)
        return flow

    def _open(self, message: stage_pb2.OpenEdge) -> None:
        key = wire.key_from_wire(message.key)
        self._moved.discard(key)
        if self._consumer.is_complete(key):
            self.reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=message.key)))
            return
        flow = self._expected(key)
        connector = name_of(message.connector)
        connector = GRPC if connector == AUTO else connector
        works = connector == GRPC or self._producer.reader(connector) is not None
        if not works and connector not in self._met:
            raise NotReadyError(
                f"edge {key.edge} was opened by connector {connector}, on which {self._producer.replica} and this "
                "replica have not agreed",
                reason="CONNECTOR_UNAVAILABLE",
            )
        self._flows[key] = flow
        self._transfers.drop(key)
        opened = flow.open(self, incarnation=self._producer.incarnation, connector=connector, opening=message.opening)
        if works:
            self.reply(stage_pb2.PutReply(opened=opened))
        else:
            self._resync_failed(flow)

    def _resync_failed(self, flow: InletAttempt) -> None:
        """The reader of the flow's connector failed, for this flow or another, before the producer knew."""
        error = UnavailableError(f"connector {flow.connector} with {self._producer.replica} has failed")
        flow.resync(error, failed=flow.connector)

    def _demand(self, demand: stage_pb2.CreditDemand) -> None:
        flow = self._flow(demand.key)
        if flow is not None:
            flow.demand(demand.size_bytes)

    def _offered(self, offer: stage_pb2.Offer) -> None:
        task = self._loop.create_task(self._meet(offer), name=f"meeting with {self._name}")
        self._meetings.add(task)
        task.add_done_callback(self._meetings.discard)

    async def _meet(self, offer: stage_pb2.Offer) -> None:
        meeting = stage_pb2.Meeting(connector=offer.connector)
        try:
            name = name_of(offer.connector)
            await self._producer.meet(name, offer.offer, arena_fd=self._arena_fd)
            self._met.add(name)
        except StagemeshError as exc:
            meeting.error.CopyFrom(wire.error_to_wire(exc))
        self.reply(stage_pb2.PutReply(meeting=meeting))

    # -- chunks

    def _piece(self, piece: chunk_pb2.ChunkPiece, payload: memoryview) -> None:
        flow = self._flow(piece.key)
        if flow is None:
            return
        if self._transfers.is_new(piece.transfer_id):
            flow.check_room(piece.total_bytes)
            self._transfers.begin(flow.key, piece)
        if not self._transfers.add(flow.key, piece, payload):
            flow.resync(
                InvalidChunkError(
                    f"a piece of edge {flow.key.edge} at {piece.offset} does not go on where the last one ended",
                    reason="PIECE_GAP",
                )
            )

    def _chunk(self, chunk: chunk_pb2.Chunk) -> None:
        data = chunk.data if chunk.HasField("data") else None
        taken = False
        try:
            flow = self._flow(chunk.key)
            if flow is not None:
                taken = self._chunk_of(flow, chunk, data)
        finally:
            if data is not None and not taken:
                self._producer.give_back_unless_held(data.lease_id)

    def _chunk_of(self, flow: InletAttempt, chunk: chunk_pb2.Chunk, data: chunk_pb2.ChunkData | None) -> bool:
        """Whether the chunk's lease is used (or was given back)."""
        try:
            if not flow.check_seq(chunk.seq):
                return False
        except InvalidChunkError as exc:
            flow.resync(exc)
            return False
        if data is not None:
            return self._data(flow, data)
        match chunk.WhichOneof("content"):
            case "end":
                flow.deliver_end(chunk.end)
            case "abort":
                flow.deliver_abort(wire.error_from_wire(chunk.abort.error))
            case _:
                raise InvalidChunkError(f"chunk {chunk.seq} of edge {flow.key.edge} is empty")
        return False

    def _data(self, flow: InletAttempt, data: chunk_pb2.ChunkData) -> bool:
        flow.check_room(data.size_bytes)
        if len(data.tensors) > wire.MAX_TENSORS:
            raise InvalidChunkError(f"{len(data.tensors)} tensors in a chunk; at most {wire.MAX_TENSORS} are taken")
        if not data.lease_id:
            streamed = self._transfers.tensors(data)
            if streamed is None:
                flow.resync(
                    InvalidChunkError(f"pieces of a chunk of edge {flow.key.edge} are missing", reason="PIECES_MISSING")
                )
            else:
                flow.deliver(chunk_decoding.packet(data, streamed))
            return False
        reader = self._producer.reader(flow.connector)
        if reader is None and flow.connector in self._met:
            self._resync_failed(flow)
            return False
        if reader is None:
            raise InvalidChunkError("a chunk comes by a connector that was not agreed on")
        if isinstance(reader, InPlaceReader):
            packet, views = chunk_decoding.in_place(data, reader)
            self._producer.hold(data.lease_id, views)
            flow.deliver(packet)
        else:
            assert isinstance(reader, FetchingReader), "a reader looks or fetches"
            names, places = chunk_decoding.in_arena(data)
            fetched = reader.fetch_at_once(places, flow.landing_account)
            if fetched is not None:
                flow.deliver(chunk_decoding.packet(data, dict(zip(names, fetched, strict=True))))
                return False
            self._producer.held_lease_ids.add(data.lease_id)
            fetching = self._loop.create_task(self._fetched(flow, reader, data), name=f"fetch of {flow.key.edge}")
            # Also of one that is cancelled before it begins.
            fetching.add_done_callback(lambda _: self._producer.give_back(data.lease_id))
            flow.deliver_later(fetching, size_bytes=data.size_bytes)
        return True

    async def _fetched(self, flow: InletAttempt, reader: FetchingReader, data: chunk_pb2.ChunkData) -> Packet:
        """The packet, once its bytes are here."""
        names, places = chunk_decoding.in_arena(data)
        try:
            fetched = await reader.fetch(places, flow.landing_account)
            return chunk_decoding.packet(data, dict(zip(names, fetched, strict=True)))
        except UnavailableError:
            # It is not used again: the next offer is met anew.
            await self._producer.drop_reader(flow.connector, reader)
            raise
        except StagemeshError:
            raise
        except Exception as exc:
            # The outermost edge of a task, and the connector may be anybody's.
            _log.exception("connector %s failed in a way that it does not name", flow.connector)
            raise UnavailableError(f"connector {flow.connector} failed: {type(exc).__name__}: {exc}") from exc
