"""A replica's data plane: its arena, its links to the replicas it feeds, and the flows that feed it."""

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator

from stagemesh.connectors import wire
from stagemesh.connectors.arena import Arena
from stagemesh.connectors.base import ChunkPolicy, ConnectorName, EdgeKey, Inlet, Outlet
from stagemesh.connectors.errors import (
    ExistsError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    UnavailableError,
)
from stagemesh.connectors.inflow import InFlow
from stagemesh.connectors.link import Link
from stagemesh.connectors.outflow import OutFlow, Sent
from stagemesh.connectors.session import LeaseBook, PutSession
from stagemesh.v1 import stage_pb2

RETAINED_SHARE = 4
"""Chunks that have arrived are kept up to this part of the arena."""

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
        self._arena.on_pressure = self._evict_oldest
        self._links: dict[tuple[str, str], Link] = {}
        self._arrived: deque[tuple[OutFlow, Sent, int]] = deque()
        self._retained_bytes = 0
        self._inflows: dict[EdgeKey, InFlow] = {}
        self._completed: OrderedDict[EdgeKey, None] = OrderedDict()
        self._sessions: set[PutSession] = set()
        self._leases: dict[tuple[str, str], LeaseBook] = {}

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
    def credit_bytes(self) -> int:
        """Bytes that producers may still send here."""
        return sum(flow.credit_bytes for flow in self._inflows.values())

    # -- producing

    def open_outlet(
        self, key: EdgeKey, *, endpoint: str, consumer: str, connector: ConnectorName, policy: ChunkPolicy
    ) -> Outlet:
        """Begins a flow to `consumer`; returns at once, sending waits until the consumer has taken it."""
        if connector is ConnectorName.NIXL:
            raise NotReadyError(
                f"edge {key.edge} asks for connector nixl, which this build does not have; use auto, shm or grpc",
                reason="CONNECTOR_UNAVAILABLE",
            )
        link = self._links.get((consumer, endpoint))
        if link is None:
            link = self._links[consumer, endpoint] = self._dial(consumer, endpoint)
        flow = OutFlow(key, connector=connector, policy=policy, arena=self._arena, carrier=link)
        link.add(flow)
        return flow

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

    def open_inlet(self, key: EdgeKey, *, producer: str) -> Inlet:
        """Expects a flow from `producer`; ExistsError where it is expected already."""
        if key in self._inflows:
            raise ExistsError(f"edge {key.edge} of request {key.request_id} is open already", reason="FLOW_EXISTS")
        flow = InFlow(
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

    async def serve_put(
        self, requests: AsyncIterator[stage_pb2.PutChunkRequest]
    ) -> AsyncGenerator[stage_pb2.PutChunkResponse]:
        """A producer's PutChunk stream, from its Hello to its end."""
        session = await self._greet(requests)
        self._sessions.add(session)
        welcome = stage_pb2.Welcome(
            replica=self._replica,
            incarnation=self.incarnation,
            connectors=[wire.connector_to_wire(name) for name in session.connectors],
            inline_limit_bytes=self._inline_limit_bytes,
            held_lease_ids=session.held_lease_ids,
        )
        reader = asyncio.create_task(session.read(requests))
        try:
            yield stage_pb2.PutChunkResponse(welcome=welcome)
            async for response in session.replies():
                yield response
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._sessions.discard(session)
            session.close()

    # -- for sessions

    def find(self, key: EdgeKey) -> InFlow | None:
        """See `FlowRegistry`."""
        return self._inflows.get(key)

    def attempt_of(self, key: EdgeKey) -> int:
        """See `FlowRegistry`."""
        same = (flow.attempt for flow in self._inflows if flow[:2] == key[:2])
        return max(same, default=0)

    def is_complete(self, key: EdgeKey) -> bool:
        """See `FlowRegistry`."""
        return key in self._completed

    async def close(self) -> None:
        """Ends all flows and frees the arena. Closing twice is harmless."""
        for link in self._links.values():
            await link.close()
        for flow in list(self._inflows.values()):
            flow.fail(UnavailableError(f"{self._replica} shuts down"))
        self._links.clear()
        self._arena.close()

    # -- inner workings

    def _forget(self, flow: InFlow) -> None:
        del self._inflows[flow.key]
        if flow.complete:
            self._completed[flow.key] = None
            if len(self._completed) > REMEMBERED_FLOWS:
                self._completed.popitem(last=False)

    def _dial(self, consumer: str, endpoint: str) -> Link:
        hello = stage_pb2.Hello(
            replica=self._replica,
            incarnation=self.incarnation,
            pipeline=self._pipeline,
            generation=self._generation,
            arena=self._arena.advertise(),
        )
        return Link(
            consumer=consumer,
            endpoint=endpoint,
            hello=hello,
            inline_limit_bytes=self._inline_limit_bytes,
            on_retain=self._retain,
        )

    def _retain(self, flow: OutFlow, sent: Sent) -> None:
        """Keeps a chunk that has arrived for those who ask again, and no more of them than the budget."""
        self._arrived.append((flow, sent, sent.size_bytes))
        self._retained_bytes += sent.size_bytes
        while self._retained_bytes > self._arena.size_bytes // RETAINED_SHARE:
            self._evict_oldest()
        self._arena.wake()

    def _evict_oldest(self) -> bool:
        """Drops the oldest chunk that has arrived; says whether there was one that was still kept."""
        while self._arrived:
            flow, sent, size_bytes = self._arrived.popleft()
            self._retained_bytes -= size_bytes
            if flow.evict(sent):
                return True
        return False

    async def _greet(self, requests: AsyncIterator[stage_pb2.PutChunkRequest]) -> PutSession:
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message of PutChunk must hold Hello", reason="NO_HELLO")
        hello = first.hello
        self._check_same("pipeline", hello.pipeline, self._pipeline)
        self._check_same("generation", hello.generation, self._generation)
        self._fail_former(hello)
        book = self._leases.get((hello.replica, hello.incarnation)) or LeaseBook()
        self._leases[hello.replica, hello.incarnation] = book
        return PutSession(hello, flows=self, leases=book)

    def _check_same(self, what: str, theirs: str, mine: str) -> None:
        if theirs != mine:
            raise NotReadyError(
                f"the producer serves {what} {theirs!r}, this replica {mine!r}; deploy both from one pipeline file",
                reason=f"WRONG_{what.upper()}",
            )

    def _fail_former(self, hello: stage_pb2.Hello) -> None:
        """A producer that comes back as another incarnation has lost what its former self was sending."""
        for name, incarnation in [book for book in self._leases if book[0] == hello.replica]:
            if incarnation != hello.incarnation:
                del self._leases[name, incarnation]
                for flow in self._inflows.values():
                    if flow.producer == name and flow.next_seq:
                        flow.fail(flow.lost_error())


async def _replayed(key: EdgeKey, sent: Sent, transfer_id: int) -> AsyncIterator[stage_pb2.GetChunkResponse]:
    packet, region = sent.packet, sent.region
    if packet is None or packet.size_bytes <= wire.PIECE_BYTES:
        chunk = wire.inline_chunk(key, sent.seq, packet) if packet else wire.tail_chunk(key, sent.seq, sent.tail)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
        return
    if region is not None:
        region.retain()
    try:
        for piece in wire.pieces(key, packet, transfer_id=transfer_id):
            yield stage_pb2.GetChunkResponse(piece=piece)
        yield stage_pb2.GetChunkResponse(chunk=wire.streamed_chunk(key, sent.seq, packet, transfer_id=transfer_id))
    finally:
        if region is not None:
            region.release()
