"""A link: this replica's connection to one that it feeds, and the flows that go over it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Sequence
from copy import copy

from stagemesh.connectors import local, wire
from stagemesh.connectors.arena import Region
from stagemesh.connectors.base import GRPC, ConnectorName, EdgeKey
from stagemesh.connectors.channels import open_channel
from stagemesh.connectors.errors import InternalError, InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.connectors.lanes import GrpcLane, LocalLane
from stagemesh.connectors.negotiation import EdgeProbe, Negotiation
from stagemesh.connectors.outflow import OutFlow, Sent
from stagemesh.connectors.pulse import Pulse
from stagemesh.connectors.put_stream import PutStream
from stagemesh.connectors.registry import ReplicaConnectors, name_of
from stagemesh.v1 import chunk_pb2, stage_pb2

GIVE_UP_S = 15.0
"""How long a consumer that is silent may be out of reach before its flows fail."""
REFUSED_S = 0.5
"""How long nobody may listen at a consumer's address before its flows fail: the process is gone."""
_RETRY_S = 0.1
_DIAL_S = 1.0
_SILENCE_CHECK_S = 0.5
_LOCAL_TRIES = 3
"""So often may the greeting on a local stream fail before flows do without one."""

_log = logging.getLogger(__name__)


class Link:
    """Implements `Carrier`. Reconnects while it has flows; an idle one stays connected until it breaks.

    A connection is the PutChunk stream and, to a consumer on this host, a local stream beside it, which
    then carries all flows but those of connector grpc.
    """

    def __init__(
        self,
        *,
        consumer: str,
        endpoint: str,
        hello: stage_pb2.Hello,
        arena_fd: int,
        connectors: ReplicaConnectors,
        inline_limit_bytes: int,
        on_retain: Callable[[OutFlow, Sent], None],
        on_idle: Callable[["Link"], None],
    ) -> None:
        self.inline_limit_bytes = inline_limit_bytes
        self._consumer, self._endpoint, self._hello = consumer, endpoint, hello
        self._arena_fd, self._connectors = arena_fd, connectors
        self._on_retain, self._on_idle = on_retain, on_idle
        self._flows: dict[EdgeKey, OutFlow] = {}
        self._streams: dict[OutFlow, PutStream] = {}
        self._to_open: dict[OutFlow, None] = {}
        self._probes: dict[asyncio.Future[EdgeProbe], ConnectorName] = {}
        self._leases: dict[int, Sequence[Region]] = {}
        self._lease_ids = self._transfer_ids = 0
        self._incarnation = ""
        self._main: PutStream | None = None
        self._local: PutStream | None = None
        self._negotiation: Negotiation | None = None
        self._local_failures = 0
        self._watch: local.DeathWatch | None = None
        self._loop = asyncio.get_running_loop()
        self._seen_s = self._loop.time()
        self._refused_s: float | None = None
        self._changed = Pulse()
        self._task = asyncio.create_task(self._run(), name=f"link to {consumer}")

    # -- for flows

    def add(self, flow: OutFlow) -> None:
        """Takes a flow and opens it as soon as there is a stream."""
        if not self._flows:
            self._seen_s = self._loop.time()
        self._flows[flow.key] = flow
        self.reopen(flow)
        self._changed.fire()

    def find(self, key: EdgeKey) -> OutFlow | None:
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

    def ready(self, flow: OutFlow) -> None:
        """See `Carrier`."""
        stream = self._streams.get(flow)
        if stream is not None:
            stream.ready(flow)

    def reopen(self, flow: OutFlow) -> None:
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

    def retain(self, flow: OutFlow, sent: Sent) -> None:
        """See `Carrier`."""
        self._on_retain(flow, sent)

    def forget(self, flow: OutFlow) -> None:
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
        self._fail_flows(UnavailableError(f"{self._hello.replica} shuts down"))
        self._reclaim_all()
        self._stop_watching()

    # -- the connection

    @property
    def _is_needed(self) -> bool:
        """Whether somebody waits for a connection: also a lease comes back over one, or is known to be lost."""
        return bool(self._flows or self._probes or self._leases)

    async def _run(self) -> None:
        while True:
            while not self._is_needed:
                await self._changed.wait()
            try:
                cause = await self._connection()
            except StagemeshError as exc:
                cause = exc
            except Exception as exc:  # noqa: BLE001 - the task's outermost edge
                # A fault here must fail the link's flows, not leave them waiting.
                _log.exception("the link to %s failed", self._consumer)
                cause = InternalError(f"the link to {self._consumer} failed: {exc!r}")
            await self._lost(cause)
            if not self._is_needed:
                self._on_idle(self)
                return
            await asyncio.sleep(_RETRY_S)

    async def _connection(self) -> StagemeshError:
        """Connects and serves; returns why the connection is over."""
        async with open_channel(self._endpoint) as channel, contextlib.AsyncExitStack() as stack:
            main = PutStream(self._consumer, self._take_reply)
            lane = GrpcLane(channel, main, peer=f"replica {self._consumer} at {self._endpoint}")
            carrying = asyncio.create_task(lane.run())
            stack.push_async_callback(_ended, carrying)
            stack.push_async_callback(main.close)
            welcome = await main.greet(lane, self._hello)
            self._welcomed(welcome)
            streams = [main]
            beside = await self._open_local(welcome, stack)
            if beside is not None:
                streams.append(beside)
            self._main, self._local = main, beside
            negotiation = Negotiation(
                self._connectors, consumer=self._consumer, offer=(beside or main).send, settled=self._settled
            )
            stack.push_async_callback(negotiation.close)
            self._negotiation = negotiation
            self._to_open = dict.fromkeys(self._flows.values())
            self._settled()
            return await self._first_end(streams)

    async def _first_end(self, streams: Sequence[PutStream]) -> StagemeshError:
        """Why the first of the streams ended; looks after silent flows meanwhile."""
        ends = [asyncio.create_task(stream.ended()) for stream in streams]
        try:
            while True:
                done, _ = await asyncio.wait(ends, timeout=_SILENCE_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return done.pop().result()
                now_s = self._loop.time()
                for flow in list(self._flows.values()):
                    flow.check_silence(now_s)
        finally:
            for end in ends:
                end.cancel()

    async def _open_local(self, welcome: stage_pb2.Welcome, stack: contextlib.AsyncExitStack) -> PutStream | None:
        """A stream beside the main one, where the consumer proves to be on this host; `stack` closes it."""
        if not welcome.local_socket:
            return None
        try:
            connection = await local.dial(welcome.local_socket, arena_fd=self._arena_fd)
        except OSError as exc:
            _log.info("%s is not on this host: %s", self._consumer, exc.strerror)
            return None
        watch = local.watch_peer(connection, self._died)
        stream = PutStream(self._consumer, self._take_reply)
        _, lane = await self._loop.create_unix_connection(
            lambda: LocalLane(stream, peer=f"replica {self._consumer}"), sock=connection
        )
        stack.push_async_callback(stream.close)
        try:
            found = await stream.greet(lane, self._hello)
        except StagemeshError as exc:
            self._local_failures += 1
            _log.warning("no local stream to %s: %s", self._consumer, exc.message)
            if watch is not None:
                watch.close()
            if self._local_failures < _LOCAL_TRIES:
                # It is on this host: the whole connection is made anew.
                raise
            return None
        self._local_failures = 0
        if found.incarnation != welcome.incarnation:
            _log.warning("somebody else is at the local socket that %s named", self._consumer)
            await stream.close()
            if watch is not None:
                watch.close()
            return None
        self._stop_watching()
        self._watch = watch
        return stream

    def _welcomed(self, welcome: stage_pb2.Welcome) -> None:
        if self._incarnation and self._incarnation != welcome.incarnation:
            restarted = UnavailableError(f"replica {self._consumer} was restarted", reason="PEER_RESTARTED")
            self._fail_flows(restarted, opened_only=True)
        # What was lent in messages that never arrived comes back here.
        self._reclaim_all(but=set(welcome.held_lease_ids))
        self._incarnation = welcome.incarnation
        self.inline_limit_bytes = min(self.inline_limit_bytes, welcome.inline_limit_bytes)
        self._refused_s = None
        _log.info("connected to %s at %s", self._consumer, self._endpoint)

    def _settled(self) -> None:
        """Something is known about the connectors that can be used."""
        self._open_flows()
        self._answer_probes()

    def _answer_probes(self) -> None:
        for answer, wanted in list(self._probes.items()):
            if self._negotiation is None or answer.done():
                continue
            try:
                found = self._negotiation.probe(wanted)
            except StagemeshError as exc:
                answer.set_exception(exc)
                continue
            if found is not None:
                answer.set_result(found)

    def _open_flows(self) -> None:
        """Opens the flows that wait for it, each on the stream that its connector needs."""
        if self._negotiation is None or self._main is None:
            return
        for flow in list(self._to_open):
            try:
                connector = self._negotiation.choose(flow.wanted)
            except StagemeshError as exc:
                flow.fail(exc)
                continue
            if connector is None:
                continue
            del self._to_open[flow]
            stream = self._main if connector == GRPC or self._local is None else self._local
            former = self._streams.get(flow)
            if former is not None:
                former.forget(flow)
            self._streams[flow] = stream
            stream.send(flow.opening(connector, self._negotiation.reader(connector)))

    # -- replies

    def _take_reply(self, reply: stage_pb2.PutReply) -> None:
        kind = reply.WhichOneof("reply")
        if kind == "release":
            for lease_id in reply.release.lease_ids:
                self.reclaim(lease_id)
        elif kind == "meeting":
            if self._negotiation is not None:
                self._negotiation.meet(reply.meeting)
        elif kind is not None:
            flow = self._flows.get(wire.key_from_wire(getattr(reply, kind).key))
            if flow is not None:
                self._apply(flow, reply, kind)

    def _apply(self, flow: OutFlow, reply: stage_pb2.PutReply, kind: str) -> None:
        match kind:
            case "ack":
                flow.acknowledge(reply.ack.next_seq)
            case "credit":
                flow.grant(reply.credit.limit_bytes)
            case "opened":
                flow.opened(reply.opened)
            case "commit":
                flow.committed()
            case "rejected":
                flow.fail(wire.error_from_wire(reply.rejected.error))
            case "resync":
                self._resync(flow, reply.resync)
            case _:
                flow.fail(InvalidChunkError("the consumer sent an unknown reply"))

    def _resync(self, flow: OutFlow, resync: stage_pb2.EdgeResync) -> None:
        error = wire.error_from_wire(resync.error)
        _log.warning("%s asks for edge %s to be opened again: %s", self._consumer, flow.key.edge, error.message)
        if resync.failed != chunk_pb2.CONNECTOR_UNSPECIFIED and self._negotiation is not None:
            self._negotiation.fail(name_of(resync.failed), error)
        self.reopen(flow)

    # -- loss

    async def _lost(self, cause: StagemeshError) -> None:
        if self._main is not None:
            _log.warning("lost %s at %s: %s", self._consumer, self._endpoint, cause.message)
            self._seen_s = self._loop.time()
        self._main = self._local = self._negotiation = None
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
        host, _, port = self._endpoint.rpartition(":")
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
        died = UnavailableError(f"replica {self._consumer} died", reason="PEER_DIED")
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


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
