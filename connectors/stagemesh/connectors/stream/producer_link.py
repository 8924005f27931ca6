"""The producer's end of the link to one consumer. Manages the connections to this consumer and the flows to it."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from copy import copy

from stagemesh.common.errors import InternalError, InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.plugins.connectors import ConnectorName, name_of
from stagemesh.common.tasks import end_tasks
from stagemesh.common.wire.versions import check_version, unknown_kind
from stagemesh.connectors import peer_timeouts, wire
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.flow.sent_chunks import Leases
from stagemesh.connectors.packets import EdgeKey, expired_error
from stagemesh.connectors.stream import local_socket
from stagemesh.connectors.stream.connection import Connection
from stagemesh.connectors.stream.connector_agreement import EdgeProbe, Peer
from stagemesh.rpc.channels import MAX_NAME, is_listening
from stagemesh.rpc.error_mapping import error_from_wire, error_to_wire
from stagemesh.v1 import chunk_pb2, stage_pb2

_RETRY_S = 0.1
_ANSWERS = frozenset({"opened", "ack", "commit"})
"""The replies by which a consumer shows that it processes a flow."""

_log = logging.getLogger(__name__)


class ProducerLink:
    """Manages the flows to one consumer, and the leases that the consumer has on regions of the arena.

    Flows and leases persist when a connection ends. The link reconnects while it has flows, probes or leases. An idle
    link remains connected until its connection breaks.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        inline_limit_bytes: int,
        on_idle: Callable[["ProducerLink"], None],
        siblings: Callable[[], Iterable["ProducerLink"]],
    ) -> None:
        """Creates a link that is not connected.

        Args:
            peer: The consumer and its address.
            inline_limit_bytes: The maximum size, in bytes, of a chunk that is sent inline.
            on_idle: Called when the link has been disconnected and has nothing to do.
            siblings: Returns all links to the same consumer. Another link may have granted a lease that the consumer
                releases or accepts over this link.
        """
        self._peer, self._inline_limit_bytes = peer, inline_limit_bytes
        self._on_idle, self._siblings = on_idle, siblings
        self._flows: dict[EdgeKey, OutletAttempt] = {}
        self._to_open: dict[OutletAttempt, None] = {}
        self._probes = 0
        """The number of probes that wait for a connector."""
        self._failure: StagemeshError | None = None
        """The last error with which the link has failed. None if it has never failed."""
        self._changed = Notifier()
        """A notifier that fires when the result of a probe may have changed, and when the link has failed."""
        self.leases = Leases()
        """The leases that this link has granted to the consumer."""
        self._incarnation = ""
        self._connection: Connection | None = None
        self._is_answered = False
        """Whether a reply of `_ANSWERS` has arrived on the connection. Without one, the consumer is unreachable."""
        self._watch: local_socket.DeathWatch | None = None
        self._loop = asyncio.get_running_loop()
        self._seen_s = self._loop.time()
        self._refused_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    # -- flows

    def add(self, flow: OutletAttempt) -> None:
        """Adds a flow to the link. The link opens the flow as soon as the link has a stream."""
        self._require_connection()
        self._flows[flow.key] = flow
        flow.join(self.leases, self._attend)

    def find(self, key: EdgeKey) -> OutletAttempt | None:
        """Returns the flow with this key, or None if the flow is unknown or has ended."""
        return self._flows.get(key)

    async def probe(self, wanted: ConnectorName) -> EdgeProbe:
        """Negotiates a connector. Returns the connector that a flow would use if the flow requested `wanted`.

        Raises NotReadyError if the requested connector cannot be used, or the link's error if the link fails. Waits for
        a connection without a time limit: the caller must set a time limit.
        """
        self._require_connection()
        failure = self._failure
        self._probes += 1
        try:
            while self._failure is failure:
                connection = self._connection
                if connection is not None and (found := connection.agreement.probe(wanted)) is not None:
                    return found
                await self._changed.wait()
        finally:
            self._probes -= 1
        assert self._failure is not None, "the loop ends when the link has failed"
        raise copy(self._failure)

    async def close(self) -> None:
        """Ends the connection and all flows. Idempotent."""
        if self._task is not None:
            await end_tasks((self._task,))
        self._fail_flows(UnavailableError(f"{self._peer.hello.replica} shuts down", reason="SHUTTING_DOWN"))
        self.leases.end_all()
        self._stop_watching()

    def _attend(self, flow: OutletAttempt) -> None:
        """Opens a flow as soon as possible. If the flow has ended, removes the flow instead."""
        if not flow.is_over:
            self._to_open[flow] = None
            self._open_flows()
            return
        if self._flows.get(flow.key) is flow:
            del self._flows[flow.key]
        self._to_open.pop(flow, None)

    # -- the connection

    @property
    def _is_needed(self) -> bool:
        """Whether a connection is needed for flows, for probes, or to receive the ids of ended leases."""
        return bool(self._flows or self._probes or self.leases)

    def _require_connection(self) -> None:
        """Begins to connect to the consumer, unless the link is already connected or connecting."""
        if not self._flows:
            self._seen_s = self._loop.time()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"link to {self._peer.consumer}")

    async def _run(self) -> None:
        while True:
            try:
                cause = await self._connected()
            except StagemeshError as exc:
                cause = exc
            except Exception:  # noqa: BLE001 - the outermost code of a task
                # A defect must fail the flows of the link, because they would wait forever otherwise.
                _log.exception("the link to %s failed", self._peer.consumer)
                cause = InternalError(f"the link to {self._peer.consumer} failed; the replica's log has the cause")
            await self._lost(cause)
            if self._is_needed:
                await asyncio.sleep(_RETRY_S)
            # The consumer's termination may have been detected during the pause.
            if not self._is_needed:
                self._on_idle(self)
                return

    async def _connected(self) -> StagemeshError:
        """Connects to the consumer and serves the connection. Returns the error that ended the connection."""
        connection = Connection(self._peer, take_reply=self._take_reply, on_negotiated=self._negotiated)
        async with aclosing(connection):
            welcome = await connection.connect()
            self._accept(welcome)
            watch = await connection.open_local(welcome, died=self._died)
            if watch is not None:
                self._stop_watching()
                self._watch = watch
            self._connection, self._is_answered = connection, False
            self._to_open = dict.fromkeys(self._flows.values())
            self._negotiated()
            return await connection.serve(self._check_silence)

    def _check_silence(self) -> None:
        now_s = self._loop.time()
        for flow in list(self._flows.values()):
            flow.check_silence(now_s)

    def _accept(self, welcome: stage_pb2.Welcome) -> None:
        check_version(welcome.protocol, peer=str(self._peer), own_name=f"producer {self._peer.hello.replica}")
        if not 0 < len(welcome.incarnation) <= MAX_NAME:
            raise InvalidChunkError(f"replica {self._peer.consumer} did not report its incarnation")
        if self._incarnation and self._incarnation != welcome.incarnation:
            restarted = UnavailableError(f"replica {self._peer.consumer} was restarted", reason="PEER_LOST")
            self._fail_flows(restarted, opened_only=True)
            self._peer.worked.clear()
            self.leases.end_dead()
        # Ends the leases of chunks whose messages never arrived.
        self.leases.end_all(except_ids=set(welcome.held_lease_ids))
        self._incarnation = welcome.incarnation
        self._inline_limit_bytes = min(self._inline_limit_bytes, welcome.inline_limit_bytes)
        self._refused_s = None
        _log.info("connected to %s at %s", self._peer.consumer, self._peer.address.endpoint)

    def _negotiated(self) -> None:
        """Opens waiting flows and lets probes continue.

        Called when a connector or stream has become usable, or when a connector has been rejected.
        """
        self._open_flows()
        self._changed.fire()

    def _open_flows(self) -> None:
        """Opens the waiting flows whose connector and stream are available."""
        connection = self._connection
        if connection is None:
            return
        for flow in list(self._to_open):
            try:
                connector = connection.agreement.choose(flow.wanted)
            except StagemeshError as exc:
                flow.fail(exc)
                continue
            if connector is None:
                continue
            stream = connection.stream(connector, bulk=flow.chunks.is_bulk)
            if stream is None:
                continue
            del self._to_open[flow]
            opening = flow.opening(
                connector,
                reader=connection.agreement.reader(connector),
                queue=stream.ready,
                inline_limit_bytes=self._inline_limit_bytes,
            )
            stream.send(opening)

    # -- replies

    def _take_reply(self, reply: stage_pb2.PutReply) -> stage_pb2.PutItem | None:
        """Processes a reply of the consumer. Returns the answer to it, or None if it has none."""
        kind = reply.WhichOneof("reply")
        if kind == "release":
            self._release(reply.release.lease_ids)
        elif kind == "offer_answer":
            if self._connection is not None:
                self._connection.agreement.answer(reply.offer_answer)
        elif kind == "accept":
            return self._answer_acceptance(reply.accept)
        elif kind is None:
            self._refuse_unknown(reply)
        else:
            flow = self._flows.get(wire.key_from_wire(getattr(reply, kind).key))
            if flow is not None:
                self._is_answered = self._is_answered or kind in _ANSWERS
                try:
                    self._apply(flow, reply, kind)
                except StagemeshError as exc:
                    flow.fail(exc)
        return None

    def _release(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            if not self.leases.end(lease_id):
                for link in self._siblings():
                    link.leases.end(lease_id)

    def _answer_acceptance(self, accept: stage_pb2.AcceptTickets) -> stage_pb2.PutItem:
        lease_id = accept.lease_id
        is_kept = self.leases.accept(lease_id) or any(link.leases.accept(lease_id) for link in self._siblings())
        answer = stage_pb2.TicketsAnswer(
            acceptance=accept.acceptance, error=None if is_kept else error_to_wire(expired_error())
        )
        return stage_pb2.PutItem(tickets=answer)

    def _apply(self, flow: OutletAttempt, reply: stage_pb2.PutReply, kind: str) -> None:
        match kind:
            case "ack":
                flow.acknowledge(reply.ack.next_seq)
                flow.grant(reply.ack.credit_limit_bytes, reply.ack.credit_limit_chunks)
            case "credit":
                flow.grant(reply.credit.credit_limit_bytes, reply.credit.credit_limit_chunks)
            case "opened":
                flow.opened(reply.opened)
            case "commit":
                flow.commit()
            case "rejected":
                flow.fail(error_from_wire(reply.rejected.error))
            case "resync":
                self._resync(flow, reply.resync)
            case _:
                raise AssertionError(f"the reply {kind} has no handler")

    def _refuse_unknown(self, reply: stage_pb2.PutReply) -> None:
        """Fails the flow to which a reply of an unknown kind belongs.

        Does nothing if the consumer has marked the reply as ignorable. If the reply belongs to no flow, raises
        UnsupportedError (UNKNOWN_KIND), which ends the stream.
        """
        error = unknown_kind(reply, of=str(self._peer))
        if error is None:
            return
        if not reply.HasField("key"):
            raise error
        flow = self._flows.get(wire.key_from_wire(reply.key))
        if flow is not None:
            flow.fail(error)

    def _resync(self, flow: OutletAttempt, resync: stage_pb2.EdgeResync) -> None:
        error = error_from_wire(resync.error)
        _log.warning("%s asks to reopen edge %s: %s", self._peer.consumer, flow.key.edge, error.message)
        if resync.failed != chunk_pb2.CONNECTOR_UNSPECIFIED and self._connection is not None:
            self._connection.agreement.fail(name_of(resync.failed), error)
        flow.resync(error)

    # -- loss

    async def _lost(self, cause: StagemeshError) -> None:
        if self._connection is not None:
            peer = self._peer.address
            _log.warning("lost the connection to %s at %s: %s", peer.replica, peer.endpoint, cause.message)
            if self._is_answered:
                self._seen_s = self._loop.time()
        self._connection = None
        for flow in self._flows.values():
            flow.disconnect()
        is_unreachable = self._loop.time() - self._seen_s > peer_timeouts.LOST_CONSUMER_S
        if not isinstance(cause, UnavailableError):
            self._fail_flows(cause)
        elif is_unreachable or await self._is_gone():
            self._fail_flows(cause)
            # The leases of a watched process on this host do not end here, because the process may still read the
            # arena. They end when the process releases them or terminates.
            if self._watch is None and is_unreachable:
                self.leases.end_unreachable()
            elif self._watch is None:
                self.leases.end_dead()

    async def _is_gone(self) -> bool:
        """Returns whether the consumer's address has refused connections for more than REFUSING_CONSUMER_S
        seconds.

        Each call attempts one connection.
        """
        listening = await is_listening(self._peer.address.endpoint)
        if listening is False:
            self._refused_s = self._refused_s or self._loop.time()
            return self._loop.time() - self._refused_s > peer_timeouts.REFUSING_CONSUMER_S
        if listening:
            self._refused_s = None
        return False

    def _died(self) -> None:
        """Fails the opened flows and ends all leases.

        Called when the consumer's process on this host has terminated.
        """
        self._watch = None
        died = UnavailableError(f"replica {self._peer.consumer} died", reason="PEER_LOST")
        self._fail_flows(died, opened_only=True)
        self.leases.end_dead()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _fail_flows(self, error: StagemeshError, *, opened_only: bool = False) -> None:
        if not opened_only:
            # A copy, because a raised error references frames.
            self._failure = copy(error)
            self._changed.fire()
        for flow in list(self._flows.values()):
            if not opened_only or flow.was_opened:
                flow.fail(error)
