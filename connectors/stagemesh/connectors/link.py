"""A link: the one long-lived PutChunk stream from this replica to a consuming one, and the flows that it carries."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from typing import TypeAlias

import grpc

from stagemesh.connectors import wire
from stagemesh.connectors.arena import Region
from stagemesh.connectors.base import EdgeKey
from stagemesh.connectors.channels import open_channel
from stagemesh.connectors.errors import InternalError, InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.connectors.outflow import OutFlow, Sent
from stagemesh.connectors.pulse import Pulse
from stagemesh.connectors.status import from_rpc_error
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc

GIVE_UP_S = 3.0
"""How long a consumer may be out of reach before its flows fail."""
_RETRY_S = 0.1
_MESSAGE_BYTES = 1 << 20
_QUANTUM_BYTES = 256 << 10

PutCall: TypeAlias = "grpc.aio.StreamStreamCall[stage_pb2.PutChunkRequest, stage_pb2.PutChunkResponse]"

_log = logging.getLogger(__name__)


class Link:
    """Implements `Carrier`. Reconnects while it has flows; an idle one stays connected until it breaks."""

    def __init__(
        self,
        *,
        consumer: str,
        endpoint: str,
        hello: stage_pb2.Hello,
        inline_limit_bytes: int,
        on_retain: Callable[[OutFlow, Sent], None],
    ) -> None:
        self.inline_limit_bytes = inline_limit_bytes
        self._consumer, self._endpoint, self._hello = consumer, endpoint, hello
        self._on_retain = on_retain
        self._flows: dict[EdgeKey, OutFlow] = {}
        self._ready: OrderedDict[OutFlow, None] = OrderedDict()
        self._to_open: deque[OutFlow] = deque()
        self._leases: dict[int, Region] = {}
        self._lease_ids = self._transfer_ids = 0
        self._incarnation = ""
        self._connected = False
        self._seen_at = time.monotonic()
        self._changed = Pulse()
        self._task = asyncio.create_task(self._run(), name=f"link to {consumer}")

    # -- for flows

    def add(self, flow: OutFlow) -> None:
        """Takes a flow and opens it as soon as there is a stream."""
        if not self._flows:
            self._seen_at = time.monotonic()
        self._flows[flow.key] = flow
        if self._connected:
            self._to_open.append(flow)
        self._changed.fire()

    def find(self, key: EdgeKey) -> OutFlow | None:
        """The flow of that key, while it is not over."""
        return self._flows.get(key)

    def ready(self, flow: OutFlow) -> None:
        """See `Carrier`."""
        self._ready[flow] = None
        self._changed.fire()

    def lend(self, region: Region) -> int:
        """See `Carrier`."""
        self._lease_ids += 1
        region.retain()
        self._leases[self._lease_ids] = region
        return self._lease_ids

    def reclaim(self, lease_id: int) -> None:
        """See `Carrier`."""
        region = self._leases.pop(lease_id, None)
        if region is not None:
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
        self._ready.pop(flow, None)

    async def close(self) -> None:
        """Ends the stream and all flows. Closing twice is harmless."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_flows(UnavailableError(f"{self._hello.replica} shuts down"))
        self._reclaim_all()

    # -- the stream

    async def _run(self) -> None:
        while True:
            while not self._flows:
                await self._changed.wait()
            try:
                async with open_channel(self._endpoint) as channel:
                    await self._serve(stage_pb2_grpc.StageServiceStub(channel).PutChunk())
                cause: StagemeshError = UnavailableError(f"replica {self._consumer} ended the stream")
            except grpc.aio.AioRpcError as exc:
                cause = from_rpc_error(exc, peer=f"replica {self._consumer} at {self._endpoint}")
            except StagemeshError as exc:
                cause = exc
            except Exception as exc:  # noqa: BLE001 - the task's outermost edge
                # A fault here must fail the link's flows, not leave them waiting.
                _log.exception("the link to %s failed", self._consumer)
                cause = InternalError(f"the link to {self._consumer} failed: {exc!r}")
            self._lost(cause)
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, call: PutCall) -> None:
        await self._put(call, stage_pb2.PutChunkRequest(hello=self._hello))
        first = await call.read()
        if not isinstance(first, stage_pb2.PutChunkResponse):
            await call.code()
            return
        self._welcomed(first.welcome)
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            # A failed write leaves a status of its own making on the call, so the writer speaks first.
            await (writer if writer.done() else reader)
        finally:
            reader.cancel()
            writer.cancel()
            call.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    def _welcomed(self, welcome: stage_pb2.Welcome) -> None:
        if self._incarnation and self._incarnation != welcome.incarnation:
            restarted = UnavailableError(f"replica {self._consumer} was restarted", reason="PEER_RESTARTED")
            self._fail_flows(restarted, opened_only=True)
        # What was lent in messages that never arrived comes back here.
        self._reclaim_all(but=set(welcome.held_lease_ids))
        self._incarnation = welcome.incarnation
        self.inline_limit_bytes = min(self.inline_limit_bytes, welcome.inline_limit_bytes)
        self._connected = True
        self._to_open = deque(self._flows.values())
        _log.info("connected to %s at %s", self._consumer, self._endpoint)

    async def _read(self, call: PutCall) -> None:
        while isinstance(response := await call.read(), stage_pb2.PutChunkResponse):
            for reply in response.replies:
                self._take_reply(reply)

    async def _write(self, call: PutCall) -> None:
        """Sends what is ready until the call ends."""
        while True:
            items = self._next_items()
            if not items:
                await self._changed.wait()
                continue
            await self._put(call, stage_pb2.PutChunkRequest(items=items))

    async def _put(self, call: PutCall, request: stage_pb2.PutChunkRequest) -> None:
        try:
            await call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as exc:
            raise UnavailableError(f"the connection to {self._consumer} at {self._endpoint} broke") from exc

    def _next_items(self) -> list[stage_pb2.PutItem]:
        """One message's worth, a quantum from each flow in turn, so that none waits behind a large chunk."""
        items: list[stage_pb2.PutItem] = []
        while self._to_open:
            items.append(self._to_open.popleft().opening())
        budget = _MESSAGE_BYTES
        while self._ready and budget > 0:
            flow, _ = self._ready.popitem(last=False)
            demand = flow.demand()
            taken = ([demand] if demand else []) + flow.take(_QUANTUM_BYTES)
            items.extend(taken)
            budget -= sum(item.ByteSize() for item in taken)
            if flow.has_items:
                self._ready[flow] = None
        return items

    def _take_reply(self, reply: stage_pb2.PutReply) -> None:
        kind = reply.WhichOneof("reply")
        if kind == "release":
            for lease_id in reply.release.lease_ids:
                self.reclaim(lease_id)
            return
        key = {
            "opened": reply.opened.key,
            "ack": reply.ack.key,
            "credit": reply.credit.key,
            "commit": reply.commit.key,
            "rejected": reply.rejected.key,
        }.get(kind or "", chunk_pb2.EdgeKey())
        flow = self._flows.get(wire.key_from_wire(key))
        if flow is None:
            return
        try:
            self._apply(flow, reply)
        except InvalidChunkError as exc:
            flow.fail(exc)

    @staticmethod
    def _apply(flow: OutFlow, reply: stage_pb2.PutReply) -> None:
        match reply.WhichOneof("reply"):
            case "opened":
                flow.opened(reply.opened)
            case "ack":
                flow.acknowledge(reply.ack.next_seq)
            case "credit":
                flow.grant(reply.credit.limit_bytes)
            case "commit":
                flow.committed()
            case "rejected":
                flow.fail(wire.error_from_wire(reply.rejected.error))
            case _:
                raise InvalidChunkError("the consumer sent an unknown reply")

    def _lost(self, cause: StagemeshError) -> None:
        if self._connected:
            _log.warning("lost %s at %s: %s", self._consumer, self._endpoint, cause.message)
            self._seen_at = time.monotonic()
        self._connected = False
        for flow in self._flows.values():
            flow.disconnected()
        if not isinstance(cause, UnavailableError) or time.monotonic() - self._seen_at > GIVE_UP_S:
            self._fail_flows(cause)
            # A consumer that is gone reads no more; one that comes back under this name has another incarnation.
            self._reclaim_all()

    def _fail_flows(self, error: StagemeshError, *, opened_only: bool = False) -> None:
        for flow in list(self._flows.values()):
            if not opened_only or flow.was_opened:
                flow.fail(error)

    def _reclaim_all(self, *, but: Container[int] = ()) -> None:
        for lease_id in [lent for lent in self._leases if lent not in but]:
            self.reclaim(lease_id)
