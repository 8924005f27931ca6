"""A replica's data plane: its arena, its links to the replicas it feeds, and the flows that feed it."""

import asyncio
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine

from stagemesh.common.connector_descriptors import AUTO, ConnectorName, descriptor_of
from stagemesh.common.errors import (
    ExistsError,
    NotFoundError,
    NotReadyError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.tensors import Tensors
from stagemesh.connectors.arena.arena import Arena, ArenaStats
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket
from stagemesh.connectors.edge import ChunkPolicy, EdgeKey, Packet
from stagemesh.connectors.flow.fan_out import FanOut
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.flow.retention import Retention
from stagemesh.connectors.flow.sent_chunk import SentChunk
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream import wire
from stagemesh.connectors.stream.connection import Peer
from stagemesh.connectors.stream.consumer_link import ConsumerLink
from stagemesh.connectors.stream.consumer_session import ConsumerSession
from stagemesh.connectors.stream.local_socket import LocalListener, watch_peer
from stagemesh.connectors.stream.negotiation import EdgeProbe
from stagemesh.connectors.stream.producer_state import ProducerState
from stagemesh.rpc.message_streams import LocalStream, ServerStream
from stagemesh.v1 import chunk_pb2, stage_pb2

_log = logging.getLogger(__name__)

PROBE_S = 10.0
"""How long a consumer may take to settle which connector an edge to it uses."""

REMEMBERED_FLOWS = 4096
"""Flows that were read to their end are remembered, for producers that missed the last word."""


class DataPlane:
    """One per replica, used on its event loop. Create it inside the loop; close it at the end."""

    def __init__(
        self,
        *,
        replica: str,
        pipeline: str,
        generation: str,
        arena_bytes: int = 64 << 20,
        window_bytes: int = 8 << 20,
        inline_limit_bytes: int = 4 << 10,
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self._replica, self._pipeline, self._generation = replica, pipeline, generation
        self._window_bytes, self._inline_limit_bytes = window_bytes, inline_limit_bytes
        self._arena = Arena(arena_bytes)
        self._retention = Retention(self._arena)
        self._arena.on_pressure = self._retention.evict_oldest
        self._landing_task: asyncio.Task[Arena] | None = None
        self._connectors = ReplicaConnectors(
            self._arena, landing=self._landing_arena, replica=replica, incarnation=self.incarnation
        )
        self._links: dict[tuple[str, str], ConsumerLink] = {}
        self._inflows: dict[EdgeKey, InletAttempt] = {}
        self._completed: OrderedDict[EdgeKey, None] = OrderedDict()
        self._sessions: set[ConsumerSession] = set()
        self._peers: dict[tuple[str, str], ProducerState] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._listener = LocalListener(self._accept_local)

    @property
    def arena(self) -> Arena:
        """The memory that this replica produces into."""
        return self._arena

    # -- figures

    @property
    def arena_used_bytes(self) -> int:
        """Bytes of the arena in use, kept chunks included."""
        return self._arena.used_bytes

    @property
    def arena_size_bytes(self) -> int:
        """Bytes of the arena for tensors."""
        return self._arena.size_bytes

    @property
    def arena_stats(self) -> ArenaStats:
        """Use and fragmentation of the arena."""
        return self._arena.stats()

    @property
    def landing_stats(self) -> ArenaStats | None:
        """The same of the memory that chunks are fetched into; None where none was."""
        landing = self._landing_now()
        return landing.stats() if landing is not None else None

    @property
    def credit_bytes(self) -> int:
        """Bytes that producers may still send here."""
        return sum(flow.credit_bytes for flow in self._inflows.values())

    # -- producing

    def open_outlet(
        self, key: EdgeKey, *, endpoint: str, consumer: str, connector: ConnectorName, policy: ChunkPolicy
    ) -> OutletAttempt:
        """Begins a flow to `consumer`; returns at once, sending waits until the consumer has taken it."""
        if connector != AUTO:
            descriptor_of(connector)
        link = self._link(consumer, endpoint)
        flow = OutletAttempt(key, wanted=connector, policy=policy, arena=self._arena, carrier=link)
        link.add(flow)
        return flow

    def fan_out(self) -> FanOut:
        """Outlets, to be added, that carry the same packets, written once."""
        return FanOut(arena=self._arena, inline_limit_bytes=self._inline_limit_bytes)

    def open_share(self, size_bytes: int) -> PartitionTicket:
        """Sets a part of the arena aside for a worker process that writes by itself (`ArenaWriter`); see `Arena`."""
        return self._arena.open_partition(size_bytes)

    def adopt(self, handle: Handle) -> Tensors:
        """The tensors that a worker wrote, to be sent without a copy; its memory is free when they are gone."""
        return self._arena.adopt(handle).held()

    def close_share(self, ticket: PartitionTicket) -> None:
        """Takes a share back, for when its worker has ended."""
        self._arena.close_partition(ticket)

    async def probe(self, *, consumer: str, endpoint: str, connector: ConnectorName) -> EdgeProbe:
        """What a flow to `consumer` would use, settled as for one; nothing is sent.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) where the one that is wanted cannot work, and UnavailableError
        where the consumer is out of reach or does not answer within PROBE_S.
        """
        if connector != AUTO:
            descriptor_of(connector)
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._link(consumer, endpoint).probe(connector)
        except TimeoutError:
            raise UnavailableError(
                f"replica {consumer} at {endpoint} did not settle connector {connector} within {PROBE_S:g} s"
            ) from None

    async def replay(self, key: EdgeKey, *, first_seq: int) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
        """The chunks of a flow from `first_seq` on, up to its end; NotFoundError where they are gone."""
        flow = next((found for link in self._links.values() if (found := link.find(key))), None)
        if flow is None:
            raise NotFoundError(f"no edge {key.edge} of request {key.request_id} here", reason="UNKNOWN_FLOW")
        seq, transfer_id = first_seq, 0
        while True:
            kept = flow.retained_from(seq)
            if kept is None:
                raise NotFoundError(f"chunk {seq} of edge {key.edge} is no longer kept", reason="CHUNK_GONE")
            for sent in kept[:1]:
                transfer_id += 1
                async for response in _replayed(key, sent, transfer_id):
                    yield response
                seq = sent.seq + 1
            if not kept:
                if flow.ended or flow.error is not None:
                    return
                await flow.changed()

    # -- consuming

    def open_inlet(self, key: EdgeKey, *, producer: str) -> InletAttempt:
        """Expects a flow from `producer`; ExistsError where it is expected already."""
        if key in self._inflows:
            raise ExistsError(f"edge {key.edge} of request {key.request_id} is open already", reason="FLOW_EXISTS")
        flow = InletAttempt(
            key,
            producer=producer,
            window_bytes=self._window_bytes,
            max_chunk_bytes=self._arena.max_region_bytes,
            on_close=self._forget,
        )
        self._inflows[key] = flow
        # The same request may be sent again, long after it ended.
        self._completed.pop(key, None)
        return flow

    async def serve_put(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """A producer's PutChunk stream of serialized messages, from its Hello to its end."""
        session = ConsumerSession(self, on_closed=self._sessions.discard)
        lane = ServerStream(session)
        session.begin(lane)
        self._sessions.add(session)
        async for data in lane.serve(requests):
            yield data

    # -- for sessions

    def greet(self, hello: stage_pb2.Hello) -> ProducerState:
        """See `Consumer`."""
        self._check_same("pipeline", hello.pipeline, self._pipeline)
        self._check_same("generation", hello.generation, self._generation)
        self._fail_former(hello.replica, hello.incarnation)
        peer = self._peers.get((hello.replica, hello.incarnation))
        if peer is None:
            peer = ProducerState(hello.replica, hello.incarnation, self._connectors)
            self._peers[hello.replica, hello.incarnation] = peer
        return peer

    def welcome(self, peer: ProducerState) -> stage_pb2.Welcome:
        """See `Consumer`."""
        return stage_pb2.Welcome(
            replica=self._replica,
            incarnation=self.incarnation,
            inline_limit_bytes=self._inline_limit_bytes,
            held_lease_ids=sorted(peer.held_lease_ids),
            local_socket=self._listener.name,
        )

    def landing(self) -> Arena | None:
        """See `Consumer`."""
        if self._landing_task is None:
            self._close_soon(self._make_landing())
        return self._landing_now()

    def find(self, key: EdgeKey) -> InletAttempt | None:
        """See `Consumer`."""
        return self._inflows.get(key)

    def attempt_of(self, key: EdgeKey) -> int:
        """See `Consumer`."""
        same = (flow.attempt for flow in self._inflows if flow[:2] == key[:2])
        return max(same, default=0)

    def is_complete(self, key: EdgeKey) -> bool:
        """See `Consumer`."""
        return key in self._completed

    async def close(self) -> None:
        """Ends all flows and frees the arena. Closing twice is harmless."""
        await self._listener.close()
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()
        for flow in list(self._inflows.values()):
            flow.fail(UnavailableError(f"{self._replica} shuts down"))
        for session in list(self._sessions):
            await session.close()
        for peer in list(self._peers.values()):
            await peer.close()
        self._peers.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._connectors.close()
        self._arena.close()
        if self._landing_task is not None:
            await asyncio.wait((self._landing_task,))
            landing = self._landing_now()
            if landing is not None:
                landing.close()

    # -- inner workings

    def _forget(self, flow: InletAttempt) -> None:
        del self._inflows[flow.key]
        if flow.complete:
            self._completed[flow.key] = None
            if len(self._completed) > REMEMBERED_FLOWS:
                self._completed.popitem(last=False)

    def _link(self, consumer: str, endpoint: str) -> ConsumerLink:
        link = self._links.get((consumer, endpoint))
        if link is None:
            link = self._links[consumer, endpoint] = self._dial(consumer, endpoint)
        return link

    def _drop_link(self, link: ConsumerLink) -> None:
        """Nobody is at its other end, and nobody needs it: the consumer's next incarnation gets a new one."""
        for name in [name for name, known in self._links.items() if known is link]:
            del self._links[name]
        self._close_soon(link.close())

    def _close_soon(self, closing: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _dial(self, consumer: str, endpoint: str) -> ConsumerLink:
        hello = stage_pb2.Hello(
            replica=self._replica,
            incarnation=self.incarnation,
            pipeline=self._pipeline,
            generation=self._generation,
        )
        return ConsumerLink(
            Peer(consumer, endpoint, hello, self._arena.fd),
            connectors=self._connectors,
            inline_limit_bytes=self._inline_limit_bytes,
            on_retain=self._retention.keep,
            on_idle=self._drop_link,
        )

    def _landing_now(self) -> Arena | None:
        task = self._landing_task
        return None if task is None or not task.done() or task.exception() else task.result()

    async def _make_landing(self) -> None:
        try:
            await self._landing_arena()
        except StagemeshError as exc:
            _log.warning("chunks that come in pieces get memory of their own: %s", exc.message)

    async def _landing_arena(self) -> Arena:
        """The memory that chunks are fetched into; made when it is first needed, for it takes a moment and room."""
        if self._landing_task is None:
            self._landing_task = asyncio.create_task(asyncio.to_thread(Arena, self._arena.size_bytes, shared=False))
        return await asyncio.shield(self._landing_task)

    async def _accept_local(self, connection: socket.socket, arena_fd: int) -> None:
        """A producer on this host has connected."""
        session = ConsumerSession(self, arena_fd=arena_fd, on_closed=self._sessions.discard)
        self._sessions.add(session)
        loop = asyncio.get_running_loop()
        session.watch = watch_peer(connection, lambda: self._died(session))
        lane = LocalStream(session, peer="a producer on this host")
        session.begin(lane)
        await loop.connect_accepted_socket(lambda: lane, sock=connection)

    def _check_same(self, what: str, theirs: str, mine: str) -> None:
        if theirs != mine:
            raise NotReadyError(
                f"the producer serves {what} {theirs!r}, this replica {mine!r}; deploy both from one pipeline file",
                reason=f"WRONG_{what.upper()}",
            )

    def _fail_former(self, replica: str, incarnation: str) -> None:
        """A producer that comes back as another incarnation has lost what its former self was sending."""
        for peer in [former for former in self._peers.values() if former.replica == replica]:
            if peer.incarnation != incarnation:
                self._lose(peer)

    def _died(self, session: ConsumerSession) -> None:
        """The process of a producer on this host is dead."""
        if session.peer is not None:
            self._lose(session.peer)

    def _lose(self, peer: ProducerState) -> None:
        """That incarnation of a producer is gone."""
        self._peers.pop((peer.replica, peer.incarnation), None)
        self._close_soon(peer.close())
        for flow in list(self._inflows.values()):
            if flow.producer == peer.replica and flow.incarnation == peer.incarnation:
                flow.fail(flow.lost_error())


async def as_flow(key: EdgeKey, packet: Packet) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
    """A packet that no flow carries, as a flow of its own: one chunk and the end."""
    shape, digest = wire.shape_of(packet, last=None), wire.FlowDigest()
    digest.add(shape)
    chunk = SentChunk(0, shape=shape, tensors=packet.tensors, metadata=packet.metadata)
    for sent in (chunk, SentChunk(1, tail=digest.end())):
        async for response in _replayed(key, sent, 1):
            yield response


async def _replayed(key: EdgeKey, sent: SentChunk, transfer_id: int) -> AsyncIterator[stage_pb2.GetChunkResponse]:
    wire_key, tensors, shape, regions = wire.key_to_wire(key), sent.tensors, sent.shape, sent.regions
    chunk = chunk_pb2.Chunk(key=wire_key, seq=sent.seq)
    if shape is None or tensors is None:
        assert sent.tail is not None, "a chunk holds data or a tail"
        wire.fill_tail(chunk, sent.tail)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
        return
    wire.fill_metadata(chunk.data, sent.metadata or {})
    if shape.size_bytes <= wire.PIECE_BYTES:
        wire.fill_inline(chunk.data, tensors, shape)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
        return
    for region in regions:
        region.retain()
    try:
        for piece in wire.pieces(wire_key, tensors, total_bytes=shape.size_bytes, transfer_id=transfer_id):
            piece.message.payload = bytes(piece.payload)
            yield stage_pb2.GetChunkResponse(piece=piece.message)
        wire.fill_streamed(chunk.data, shape, transfer_id=transfer_id)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
    finally:
        for region in regions:
            region.release()
