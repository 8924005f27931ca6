"""A replica's data plane: its arena, its links to consumers, and the flows that it receives from producers."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Mapping
from functools import partial

from stagemesh.common.errors import NotFoundError, StaleAttemptError, UnavailableError
from stagemesh.common.plugins.connectors import AUTO, ConnectorName, descriptor_of
from stagemesh.common.process.host import retain_freed_memory, shorten_time_slices
from stagemesh.common.tasks import kept_in
from stagemesh.common.wire.chunk_sizes import ChunkPolicy
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.common.wire.versions import OFFERS, own_protocol
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.flow.edge_meters import EdgeMeters
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import NO_ROWS, FanOut, Outlet
from stagemesh.connectors.flow.received_rows import ANY_TENSORS, PacketQueue
from stagemesh.connectors.flow.sent_chunks import Retention
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey
from stagemesh.connectors.stream.connector_agreement import EdgeProbe, Peer, ReplicaConnectors
from stagemesh.connectors.stream.consumer import Consumer, LandingArena
from stagemesh.connectors.stream.consumer_session import ConsumerSession
from stagemesh.connectors.stream.local_socket import LocalListener, LocalProducer
from stagemesh.connectors.stream.producer_link import ProducerLink
from stagemesh.rpc.callers import check_reader
from stagemesh.rpc.message_streams import LocalStream, ServerStream
from stagemesh.v1 import stage_pb2

PROBE_S = 10.0
"""Time limit, in seconds, for the negotiation of a connector in `DataPlane.probe`."""


class DataPlane:
    """The data plane of one replica. Create, use and close it only on the replica's event loop."""

    def __init__(
        self,
        *,
        replica: str,
        pipeline: str,
        generation: str,
        arena_bytes: int = 64 << 20,
        window_bytes: int = 8 << 20,
        inline_limit_bytes: int = 4 << 10,
        shared_arena: bool = True,
        meters: EdgeMeters | None = None,
    ) -> None:
        """`meters` counts the sent chunks. Several data planes may share it. If it is None, creates its own."""
        shorten_time_slices()
        retain_freed_memory()
        self.incarnation = secrets.token_hex(8)
        """The random id of this data plane. A restarted replica has a different id."""
        self._identity = stage_pb2.Hello(
            replica=replica,
            incarnation=self.incarnation,
            pipeline=pipeline,
            generation=generation,
            protocol=own_protocol(OFFERS),
        )
        self._inline_limit_bytes = inline_limit_bytes
        self.arena = Arena(arena_bytes, shared=shared_arena)
        """The memory into which this replica writes its outgoing tensors."""
        self._retention = Retention(self.arena, EdgeMeters() if meters is None else meters)
        self.arena.on_pressure = self._retention.evict_oldest
        self.landing = LandingArena(self.arena.size_bytes)
        """The memory into which fetched chunks are copied. Created when the first chunk is fetched."""
        self._connectors = ReplicaConnectors(
            self.arena, landing=self.landing.get, replica=replica, incarnation=self.incarnation
        )
        self._links: dict[ConsumerAddress, ProducerLink] = {}
        self._background: set[asyncio.Task[object]] = set()
        self._sessions: set[ConsumerSession] = set()
        self._listener = LocalListener(self._accept_local)
        self.consumer = Consumer(
            self._identity,
            connectors=self._connectors,
            landing=self.landing,
            window_bytes=window_bytes,
            max_chunk_bytes=lambda: self.arena.max_region_bytes,
            welcome=stage_pb2.Welcome(
                replica=replica,
                incarnation=self.incarnation,
                protocol=own_protocol(OFFERS),
                inline_limit_bytes=inline_limit_bytes,
                local_socket=self._listener.name,
            ),
            run_in_background=self._run_in_background,
        )
        """The consumer side of the data plane, with the flows that it expects or receives, and their producers."""

    @property
    def meters(self) -> EdgeMeters:
        """The counts of the chunks that the data plane has sent."""
        return self._retention.meters

    @property
    def retained_bytes(self) -> int:
        """The payload of the delivered chunks that are retained for other consumers, in bytes."""
        return self._retention.size_bytes

    # -- producing

    def open_outlet(
        self,
        key: EdgeKey,
        consumer: ConsumerAddress,
        *,
        connector: ConnectorName,
        policy: ChunkPolicy,
        rebind_s: float = 0.0,
        first_rows: Mapping[str, int] = NO_ROWS,
    ) -> Outlet:
        """Opens a flow to `consumer` and returns immediately. Sending waits until the consumer has accepted the flow.

        Raises InvalidRequestError if the connector is unknown.

        Args:
            key: The identifier of the flow's attempt.
            consumer: The replica that receives the flow.
            connector: The connector that transfers the flow's bytes, or AUTO to negotiate one.
            policy: The policy by which packets are cut into chunks.
            rebind_s: Time limit, in seconds, for a call of `rebind_outlet` after the consumer has become unreachable.
                If it is 0, the flow fails immediately.
            first_rows: The number of rows of each tensor that an earlier attempt of the producer has sent, by name.
        """
        link = self._link(consumer, connector)
        outlet = Outlet(
            key, connector, policy=policy, retention=self._retention, rebind_s=rebind_s, first_rows=first_rows
        )
        link.add(outlet.attempt)
        return outlet

    def rebind_outlet(
        self, outlet: Outlet, key: EdgeKey, *, consumer: ConsumerAddress, connector: ConnectorName
    ) -> None:
        """Moves a flow to another consumer and sends all chunks again. Call `Outlet.check_rebindable` first.

        `key` identifies the new attempt. `consumer` and `connector` are as in `open_outlet`, for the new attempt.
        """
        link = self._link(consumer, connector)
        outlet.rebind(key, connector)
        link.add(outlet.attempt)

    def fan_out(self) -> FanOut:
        """Returns an empty group of outlets. A packet that is sent to the group is written into the arena only once."""
        return FanOut(arena=self.arena, inline_limit_bytes=self._inline_limit_bytes)

    async def probe(self, consumer: ConsumerAddress, connector: ConnectorName) -> EdgeProbe:
        """Negotiates the connector of a flow to `consumer` without sending a chunk.

        Returns the result of the negotiation. The arguments have the same meanings as in `open_outlet`.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) if the requested connector cannot be used. Raises UnavailableError
        if the consumer is unreachable or does not answer within PROBE_S seconds.
        """
        link = self._link(consumer, connector)
        try:
            async with asyncio.timeout(PROBE_S):
                return await link.probe(connector)
        except TimeoutError:
            raise UnavailableError(
                f"{consumer} did not negotiate connector {connector} within {PROBE_S:g} s", reason="NO_ANSWER"
            ) from None

    def replay(self, key: EdgeKey, *, first_seq: int) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
        """Returns an iterator over the chunks of a flow, from chunk `first_seq` to the end of the flow.

        Raises NotFoundError if the flow is unknown. The iterator raises NotFoundError if a chunk is no longer retained.
        Raises PermissionDeniedError (REPLICA_MISMATCH) if the current RPC's caller is another replica than the flow's
        consumer.
        """
        for consumer, link in self._links.items():
            if (flow := link.find(key)) is not None:
                check_reader(replica=consumer.replica)
                return flow.replay(first_seq=first_seq)
        raise NotFoundError(f"no edge {key.edge} of request {key.request_id} here", reason="UNKNOWN_FLOW")

    # -- consuming

    def open_inlet(
        self,
        key: EdgeKey,
        *,
        producer: str,
        rebind_s: float = 0.0,
        ticket_kinds: Collection[str] = (),
        accepts: Mapping[str, TensorSpec] = ANY_TENSORS,
    ) -> Inlet:
        """Returns the consumer side of a flow that `producer` will open. Does not wait for the producer.

        Raises ExistsError if the flow is already open.

        Args:
            key: The identifier of the flow's attempt.
            producer: The producer's replica name.
            rebind_s: Time limit, in seconds, for a call of `rebind_inlet` after the producer has become unreachable.
                If it is 0, the flow fails immediately.
            ticket_kinds: The kinds of tickets that the reader accepts. A flow with another kind is rejected.
            accepts: The types of tensors by name. A flow with a tensor of another type is rejected. Tensors with other
                names are not checked.
        """
        packets = PacketQueue(edge=key.edge, ticket_kinds=ticket_kinds, accepts=accepts)
        return Inlet(self.consumer.expect(key, packets, producer=producer), rebind_s=rebind_s)

    def rebind_inlet(self, inlet: Inlet, key: EdgeKey, *, producer: str, first_rows: Mapping[str, int]) -> None:
        """Continues a flow with another producer. Call `Inlet.check_rebindable` first.

        `key` identifies the new attempt. `first_rows` maps each tensor's name to the first row that the new producer
        sends.
        """
        former = inlet.attempt
        former.supersede(StaleAttemptError(f"edge {former.key.edge} has another producer"))
        inlet.rebind(self.consumer.expect(key, former.packets, producer=producer), first_rows=first_rows)

    async def serve_put(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Serves a producer's PutChunk stream until the stream ends. Receives and yields serialized messages."""
        session = self._open_session()
        stream = ServerStream(session)
        session.begin(stream)
        async for data in stream.serve(requests):
            yield data

    async def close(self) -> None:
        """Ends all flows and releases the arena and the landing memory. Idempotent."""
        await self._listener.close()
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()
        self.consumer.fail_all(UnavailableError(f"{self._identity.replica} shuts down", reason="SHUTTING_DOWN"))
        for session in list(self._sessions):
            await session.close()
        await self.consumer.close()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._connectors.close()
        self.arena.close()
        await self.landing.close()

    # -- inner workings

    def _link(self, consumer: ConsumerAddress, connector: ConnectorName) -> ProducerLink:
        if connector != AUTO:
            descriptor_of(connector)
        link = self._links.get(consumer)
        if link is None:
            link = self._links[consumer] = ProducerLink(
                Peer(consumer, self._identity, self.arena.share(), self._connectors),
                inline_limit_bytes=self._inline_limit_bytes,
                on_idle=self._drop_link,
                siblings=partial(self._links_to, consumer.replica),
            )
        return link

    def _links_to(self, consumer: str) -> list[ProducerLink]:
        """Returns the links to a consumer, one for each of its addresses."""
        return [link for address, link in self._links.items() if address.replica == consumer]

    def _drop_link(self, link: ProducerLink) -> None:
        """Closes and removes a disconnected link that no flow needs.

        A later flow to the same consumer creates a new link.
        """
        self._links = {address: known for address, known in self._links.items() if known is not link}
        self._run_in_background(link.close())

    def _run_in_background(self, work: Coroutine[object, object, object]) -> None:
        kept_in(self._background, asyncio.create_task(work))

    def _open_session(self, *, local: LocalProducer | None = None) -> ConsumerSession:
        session = ConsumerSession(self.consumer, local=local, on_closed=self._sessions.discard)
        self._sessions.add(session)
        return session

    async def _accept_local(self, local: LocalProducer) -> None:
        """Serves a producer on this host. Takes ownership of `local`."""
        session = self._open_session(local=local)
        stream = LocalStream(session, peer="a producer on this host")
        session.begin(stream)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, sock=local.connection)
