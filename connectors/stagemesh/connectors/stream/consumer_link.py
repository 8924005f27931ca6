"""A link: this replica's connection to one that it feeds, and the flows that go over it."""

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from copy import copy

from stagemesh.common.connector_descriptors import ConnectorName, name_of
from stagemesh.common.errors import InternalError, InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.common.notifier import Notifier
from stagemesh.connectors.arena.arena import Region
from stagemesh.connectors.edge import EdgeKey
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.flow.sent_chunk import SentChunk
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream import local_socket, wire
from stagemesh.connectors.stream.connection import Connection, Peer
from stagemesh.connectors.stream.negotiation import EdgeProbe
from stagemesh.connectors.stream.producer_session import ProducerSession
from stagemesh.v1 import chunk_pb2, stage_pb2

GIVE_UP_S = 15.0
"""How long a consumer that is silent may be out of reach before its flows fail."""
REFUSED_S = 0.5
"""How long nobody may listen at a consumer's address before its flows fail: the process is gone."""
_RETRY_S = 0.1
_DIAL_S = 1.0
_LOCAL_TRIES = 3
"""So often may the greeting on a local stream fail before flows do without one."""

_log = logging.getLogger(__name__)


class ConsumerLink:
    """Implements `Carrier`. Reconnects while it has flows; an idle one stays connected until it breaks.

    It keeps what outlives a connection: the flows and the leases.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        connectors: ReplicaConnectors,
        inline_limit_bytes: int,
        on_retain: Callable[[OutletAttempt, SentChunk], None],
        on_idle: Callable[["ConsumerLink"], None],
    ) -> None:
        self.inline_limit_bytes = inline_limit_bytes
        self._peer, self._connectors = peer, connectors
        self._on_retain, self._on_idle = on_retain, on_idle
        self._flows: dict[EdgeKey, OutletAttempt] = {}
        self._streams: dict[OutletAttempt, ProducerSession] = {}
        self._to_open: dict[OutletAttempt, None] = {}
        self._probes: dict[asyncio.Future[EdgeProbe], ConnectorName] = {}
        self._leases: dict[int, Sequence[Region]] = {}
        self._lease_ids = self._transfer_ids = 0
        self._incarnation = ""
        self._worked: set[ConnectorName] = set()
        """Connectors that have been agreed on with this incarnation of the consumer."""
        self._connection: Connection | None = None
        self._local_failures = 0
        self._watch: local_socket.DeathWatch | None = None
        self._loop = asyncio.get_running_loop()
        self._seen_s = self._loop.time()
        self._refused_s: float | None = None
        self._changed = Notifier()
        self._task = asyncio.create_task(self._run(), name=f"link to {peer.consumer}")

    # -- for flows

    def add(self, flow: OutletAttempt) -> None:
        """Takes a flow and opens it as soon as there is a stream."""
        if not self._flows:
            self._seen_s = self._loop.time()
        self._flows[flow.key] = flow
        self.reopen(flow)
        self._changed.fire()

    def find(self, key: EdgeKey) -> OutletAttempt | None:
        """The flow of that key, while it is not over."""
        return self._flows.get(key)

    async def probe(self, wanted: ConnectorName) -> EdgeProbe:
        """What a flow that wants this connector would use; raises why there can be none. The caller bounds it."""
        if not self._flows:
            self._seen_s = self._loop.time()
        answer: asyncio.Future[EdgeProbe] = self._loop.create_future()
        self._probes[answer] = wanted
        self._changed.fire()
        self._answer_probes()
        try:
            return await answer
        finally:
            self._probes.pop(answer, None)

    def ready(self, flow: OutletAttempt) -> None:
        """See `Carrier`."""
        stream = self._streams.get(flow)
        if stream is not None:
            stream.ready(flow)

    def reopen(self, flow: OutletAttempt) -> None:
        """See `Carrier`."""
        self._to_open[flow] = None
        self._open_flows()

    def lend(self, regions: Sequence[Region]) -> int:
        """See `Carrier`."""
        self._lease_ids += 1
        for region in regions:
            region.retain()
        self._leases[self._lease_ids] = regions
        return self._lease_ids

    def reclaim(self, lease_id: int) -> None:
        """See `Carrier`."""
        for region in self._leases.pop(lease_id, ()):
            region.release()

    def next_transfer_id(self) -> int:
        """See `Carrier`."""
        self._transfer_ids += 1
        return self._transfer_ids

    def retain(self, flow: OutletAttempt, sent: SentChunk) -> None:
        """See `Carrier`."""
        self._on_retain(flow, sent)

    def forget(self, flow: OutletAttempt) -> None:
        """See `Carrier`."""
        if self._flows.get(flow.key) is flow:
            del self._flows[flow.key]
        self._to_open.pop(flow, None)
        stream = self._streams.pop(flow, None)
        if stream is not None:
            stream.forget(flow)

    async def close(self) -> None:
        """Ends the connection and all flows. Closing twice is harmless."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_flows(UnavailableError(f"{self._peer.hello.replica} shuts down"))
        self._reclaim_all()
        self._stop_watching()

    # -- the connection

    @property
    def _is_needed(self) -> bool:
        """Whether somebody waits for a connection: also a lease comes back over one, or is known to be lost."""
        return bool(self._flows or self._probes or self._leases)

    async def _run(self) -> None:
        while not self._is_needed:
            await self._changed.wait()
        while True:
            try:
                cause = await self._connected()
            except StagemeshError as exc:
                cause = exc
            except Exception as exc:  # noqa: BLE001 - the task's outermost edge
                # A fault here must fail the link's flows, not leave them waiting.
                _log.exception("the link to %s failed", self._peer.consumer)
                cause = InternalError(f"the link to {self._peer.consumer} failed: {exc!r}")
            await self._lost(cause)
            if self._is_needed:
                await asyncio.sleep(_RETRY_S)
            # Not needed any more, or not since the consumer was found dead in the meantime.
            if not self._is_needed:
                self._on_idle(self)
                return

    async def _connected(self) -> StagemeshError:
        """Connects and serves; returns why the connection is over."""
        connection = Connection(
            self._peer, connectors=self._connectors, take_reply=self._take_reply, settled=self._settled
        )
        async with connection:
            welcome = await connection.greet()
            self._welcomed(welcome)
            await self._settle(connection, welcome)
            connection.negotiation.worked = self._worked
            self._connection = connection
            self._to_open = dict.fromkeys(self._flows.values())
            self._settled()
            return await connection.serve(self._look_after_flows)

    async def _settle(self, connection: Connection, welcome: stage_pb2.Welcome) -> None:
        """A greeting on this host that fails breaks the connection, to be made anew; not for ever."""
        with_local = self._local_failures < _LOCAL_TRIES
        try:
            await connection.settle(welcome, with_local=with_local, died=self._died)
        except StagemeshError:
            self._local_failures += 1
            raise
        if with_local:
            self._local_failures = 0
        if connection.watch is not None:
            self._stop_watching()
            self._watch, connection.watch = connection.watch, None

    def _look_after_flows(self) -> None:
        now_s = self._loop.time()
        for flow in list(self._flows.values()):
            flow.check_silence(now_s)

    def _welcomed(self, welcome: stage_pb2.Welcome) -> None:
        if not welcome.incarnation:
            raise InvalidChunkError(f"replica {self._peer.consumer} did not say its incarnation")
        if self._incarnation and self._incarnation != welcome.incarnation:
            restarted = UnavailableError(f"replica {self._peer.consumer} was restarted", reason="PEER_RESTARTED")
            self._fail_flows(restarted, opened_only=True)
            self._worked.clear()
        # What was lent in messages that never arrived comes back here.
        self._reclaim_all(but=set(welcome.held_lease_ids))
        self._incarnation = welcome.incarnation
        self.inline_limit_bytes = min(self.inline_limit_bytes, welcome.inline_limit_bytes)
        self._refused_s = None
        _log.info("connected to %s at %s", self._peer.consumer, self._peer.endpoint)

    def _settled(self) -> None:
        """Something is known about the connectors that can be used."""
        self._open_flows()
        self._answer_probes()

    def _answer_probes(self) -> None:
        for answer, wanted in list(self._probes.items()):
            if self._connection is None or answer.done():
                continue
            try:
                found = self._connection.negotiation.probe(wanted)
            except StagemeshError as exc:
                answer.set_exception(exc)
                continue
            if found is not None:
                answer.set_result(found)

    def _open_flows(self) -> None:
        """Opens the flows that wait for it, each on the stream that its connector needs."""
        if self._connection is None:
            return
        negotiation = self._connection.negotiation
        for flow in list(self._to_open):
            try:
                connector = negotiation.choose(flow.wanted)
            except StagemeshError as exc:
                flow.fail(exc)
                continue
            if connector is None:
                continue
            stream = self._connection.stream(connector, bulk=flow.is_bulk)
            if stream is None:
                continue
            del self._to_open[flow]
            former = self._streams.get(flow)
            if former is not None:
                former.forget(flow)
            self._streams[flow] = stream
            stream.send(flow.opening(connector, negotiation.reader(connector)))

    # -- replies

    def _take_reply(self, reply: stage_pb2.PutReply) -> None:
        kind = reply.WhichOneof("reply")
        if kind == "release":
            for lease_id in reply.release.lease_ids:
                self.reclaim(lease_id)
        elif kind == "meeting":
            if self._connection is not None:
                self._connection.negotiation.meet(reply.meeting)
        elif kind is not None:
            flow = self._flows.get(wire.key_from_wire(getattr(reply, kind).key))
            if flow is not None:
                try:
                    self._apply(flow, reply, kind)
                except StagemeshError as exc:
                    flow.fail(exc)

    def _apply(self, flow: OutletAttempt, reply: stage_pb2.PutReply, kind: str) -> None:
        match kind:
            case "ack":
                flow.acknowledge(reply.ack.next_seq)
                flow.grant(reply.ack.credit_limit_bytes)
            case "credit":
                flow.grant(reply.credit.limit_bytes)
            case "opened":
                flow.opened(reply.opened)
            case "commit":
                if not flow.ended:
                    raise InvalidChunkError(f"edge {flow.key.edge}: the consumer committed what has not ended")
                flow.committed()
            case "rejected":
                flow.fail(wire.error_from_wire(reply.rejected.error))
            case "resync":
                self._resync(flow, reply.resync)
            case _:
                raise InvalidChunkError("the consumer sent an unknown reply")

    def _resync(self, flow: OutletAttempt, resync: stage_pb2.EdgeResync) -> None:
        error = wire.error_from_wire(resync.error)
        _log.warning("%s asks for edge %s to be opened again: %s", self._peer.consumer, flow.key.edge, error.message)
        flow.resynced(error)
        if resync.failed != chunk_pb2.CONNECTOR_UNSPECIFIED and self._connection is not None:
            self._connection.negotiation.fail(name_of(resync.failed), error)
        self.reopen(flow)

    # -- loss

    async def _lost(self, cause: StagemeshError) -> None:
        if self._connection is not None:
            _log.warning("lost %s at %s: %s", self._peer.consumer, self._peer.endpoint, cause.message)
            self._seen_s = self._loop.time()
        self._connection = None
        self._streams.clear()
        for flow in self._flows.values():
            flow.disconnected()
        if not isinstance(cause, UnavailableError):
            self._fail_flows(cause)
        elif self._loop.time() - self._seen_s > GIVE_UP_S or await self._is_gone():
            self._fail_flows(cause)
            if self._watch is None:
                # One on this host that lives still may read: it gives its leases back, or dies.
                self._reclaim_all()

    async def _is_gone(self) -> bool:
        """Whether nobody has listened at the consumer's address for a while."""
        host, _, port = self._peer.endpoint.rpartition(":")
        try:
            async with asyncio.timeout(_DIAL_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            self._refused_s = self._refused_s or self._loop.time()
            return self._loop.time() - self._refused_s > REFUSED_S
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        self._refused_s = None
        return False

    def _died(self) -> None:
        """The consumer's process, on this host, is dead."""
        self._watch = None
        died = UnavailableError(f"replica {self._peer.consumer} died", reason="PEER_DIED")
        self._fail_flows(died, opened_only=True)
        self._reclaim_all()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _fail_flows(self, error: StagemeshError, *, opened_only: bool = False) -> None:
        for answer in () if opened_only else self._probes:
            if not answer.done():
                answer.set_exception(copy(error))
        for flow in list(self._flows.values()):
            if not opened_only or flow.was_opened:
                flow.fail(error)

    def _reclaim_all(self, *, but: Container[int] = ()) -> None:
        for lease_id in [lent for lent in self._leases if lent not in but]:
            self.reclaim(lease_id)
