"""The consumer side of one stream. Checks every received item before passing the item to a flow."""

import asyncio
import logging
import os
from collections.abc import Callable
from weakref import WeakValueDictionary

from stagemesh.common.errors import (
    InternalError,
    InvalidChunkError,
    InvalidRequestError,
    OverloadedError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.plugins.connectors import GRPC, name_of, shown_name
from stagemesh.common.tasks import end_tasks
from stagemesh.common.wire.encoding import parse_message
from stagemesh.common.wire.versions import refuse_unknown, unknown_kind
from stagemesh.connectors import fragments, wire
from stagemesh.connectors.base import FetchingReader, InPlaceReader, unavailable
from stagemesh.connectors.flow.flow_control import ReadyQueue
from stagemesh.connectors.flow.inlet_attempt import InletAttempt, Phase
from stagemesh.connectors.fragments import FragmentAssembler
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.connectors.stream.consumer import Consumer
from stagemesh.connectors.stream.local_socket import LocalProducer
from stagemesh.connectors.stream.producer_state import ProducerState
from stagemesh.rpc.callers import check_replica
from stagemesh.rpc.channels import HANDSHAKE_MS, MAX_NAME
from stagemesh.rpc.error_mapping import error_from_wire, error_to_wire
from stagemesh.rpc.message_streams import MessageStream
from stagemesh.v1 import chunk_pb2, stage_pb2

_log = logging.getLogger(__name__)

_CLOSING_S = 1.0
_HELLO_S = HANDSHAKE_MS / 1000
"""The time limit for the first message of a stream, in seconds. It has Hello, which identifies the producer."""
_MAX_FIELDS = 1 << 16
"""The limit for the fields of a message (`wire.encoding.count_fields`), which has the items of many flows."""
_MAX_REPLIES = 16_384
"""The maximum number of replies that wait when a message arrives. Beyond it, the producer does not read them."""
_LOST_MESSAGE = frozenset({"NOT_OPENED", "SEQUENCE_GAP", "FRAGMENT_GAP"})
"""The error reasons that indicate that a message of a flow was lost."""


class ConsumerSession:
    """Receives a producer's messages over one stream, and sends the replies of the stream's flows."""

    def __init__(
        self, consumer: Consumer, *, local: LocalProducer | None = None, on_closed: Callable[["ConsumerSession"], None]
    ) -> None:
        """Creates a session without a stream.

        Args:
            consumer: The registry of expected flows and of producers.
            local: The producer's local socket, which the session owns. None if the stream uses gRPC.
            on_closed: Called when the stream has ended.
        """
        self._consumer, self._local, self._on_closed = consumer, local, on_closed
        self._loop = asyncio.get_running_loop()
        self._stream: MessageStream | None = None
        self._producer_state: ProducerState | None = None
        self._flows: dict[EdgeKey, InletAttempt] = {}
        self._moved = WeakValueDictionary[EdgeKey, InletAttempt]()
        """The flows that have moved to another stream of the same producer, and have not ended."""
        self._transfers = FragmentAssembler(consumer.landing.request)
        self._negotiations: dict[int, asyncio.Task[None]] = {}
        """The negotiations that have not ended, by connector. A producer repeats an offer until it has an answer."""
        self._replies: list[stage_pb2.PutReply] = []
        self._ready = ReadyQueue[InletAttempt](self.writable)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._hello_timer = self._loop.call_later(_HELLO_S, self._end_without_hello)

    def begin(self, stream: MessageStream) -> None:
        """Starts the session on `stream`. The session must be the handler of this stream."""
        self._stream = stream

    async def close(self) -> None:
        """Ends the stream and cancels all negotiations. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            await asyncio.wait((self._over,), timeout=_CLOSING_S)
        await end_tasks(self._negotiations.values())

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        """Processes a serialized PutChunkRequest.

        Raises a StagemeshError if the message cannot be parsed, the producer is rejected, or the producer does not read
        its replies. The stream then ends.
        """
        released = self._producer_state.released_ids if self._producer_state is not None else ()
        if len(self._replies) + len(released) > _MAX_REPLIES:
            raise OverloadedError(f"{self._name} does not read its replies, of which more than {_MAX_REPLIES} wait")
        message = fragments.decode_fragment(data)
        items = data if message is None else bytes(message.rest)
        try:
            request = parse_message(stage_pb2.PutChunkRequest, items, max_fields=_MAX_FIELDS)
        except InvalidRequestError as exc:
            key = fragments.first_key(items) if exc.reason == "MESSAGE_TOO_LARGE" else None
            if key is None or self._producer_state is None:
                raise
            self._reject(key, InvalidChunkError(exc.message))
            return
        if self._producer_state is None:
            self._admit(request)
        if message is not None:
            self._guarded(message.fragment.message.key, self._fragment, message.fragment)
        for item in request.items:
            self._process(item)

    def writable(self) -> None:
        """Sends one message with all waiting replies, the reports of the flows, and the ids of ended leases.

        Does nothing if the stream cannot accept data. Called when it can again, and when there is something to send.
        """
        if self._stream is None or not self._stream.is_writable:
            return
        response = stage_pb2.PutChunkResponse(replies=self._replies)
        self._replies.clear()
        for flow in self._ready.take_all():
            if flow.queue is self._ready:
                flow.report(response)
            self._check_carried(flow)
        if self._producer_state is not None:
            self._producer_state.report(response)
        if response.replies:
            self._stream.write(response.SerializeToString())

    def closed(self, error: StagemeshError | None) -> None:
        """Detaches the flows and releases the session's resources. Called when the stream has ended.

        The flows wait for another stream from the producer. `error` is the cause, or None if the stream ended normally.
        """
        if error is not None:
            _log.info("the stream of %s ended: %s", self._name, error.message)
        self._hello_timer.cancel()
        if self._producer_state is not None:
            self._producer_state.detach(self._ready)
        for flow in self._flows.values():
            flow.detach(self._ready)
        self._flows.clear()
        self._transfers.clear()
        self._stream = None
        if self._local is not None:
            if self._local.arena_fd is not None:
                os.close(self._local.arena_fd)
            self._local = None
        if not self._over.done():
            self._over.set_result(None)
        self._on_closed(self)

    # -- replies

    def _reply(self, reply: stage_pb2.PutReply) -> None:
        self._replies.append(reply)
        self._ready.wake()

    def _check_carried(self, flow: InletAttempt) -> bool:
        """Returns whether this stream still carries a flow. If not, removes the flow and drops the flow's fragments.

        Later messages of the flow on this stream are ignored if the flow has moved to another stream, and rejected if
        the flow is closed.
        """
        is_carried = flow.queue is self._ready and not flow.is_closed
        if not is_carried and self._flows.get(flow.key) is flow:
            del self._flows[flow.key]
            self._transfers.drop(flow.key)
            if not flow.is_closed:
                self._moved[flow.key] = flow
        return is_carried

    # -- items

    @property
    def _name(self) -> str:
        return f"replica {self._producer_state.replica}" if self._producer_state else "a producer without a name"

    @property
    def _producer(self) -> ProducerState:
        assert self._producer_state is not None, "items must follow Hello"
        return self._producer_state

    def _admit(self, request: stage_pb2.PutChunkRequest) -> None:
        if not request.HasField("hello"):
            raise InvalidRequestError("the first message of PutChunk must have Hello", reason="NO_HELLO")
        if not all(0 < len(name) <= MAX_NAME for name in (request.hello.replica, request.hello.incarnation)):
            problem = f"Hello must name the producer and its incarnation by at most {MAX_NAME} characters each"
            raise InvalidRequestError(problem, reason="NO_HELLO")
        if self._local is None:
            check_replica(request.hello.replica)
        else:
            self._consumer.check_local(request.hello)
        self._producer_state = producer = self._consumer.admit(request.hello)
        self._hello_timer.cancel()
        assert self._stream is not None, "call `begin` before the session receives messages"
        self._stream.write(stage_pb2.PutChunkResponse(welcome=self._consumer.welcome(producer)).SerializeToString())
        producer.attach(self._ready)
        if self._local is not None:
            producer.watch(self._local.connection, died=lambda: self._consumer.lose(producer))

    def _end_without_hello(self) -> None:
        if self._stream is not None:
            self._stream.close(InvalidRequestError(f"no Hello arrived within {_HELLO_S:g} s", reason="NO_HELLO"))

    def _process(self, item: stage_pb2.PutItem) -> None:
        match item.WhichOneof("item"):
            case "chunk":
                chunk = item.chunk
                self._guarded(chunk.key, self._chunk, chunk)
            case "open":
                self._guarded(item.open.key, self._open, item.open)
            case "fragment":
                piece = item.fragment
                self._guarded(piece.key, self._fragment, fragments.Fragment(piece, memoryview(piece.payload)))
            case "demand":
                self._guarded(item.demand.key, self._demand, item.demand)
            case "offer":
                self._negotiate(item.offer)
            case "tickets":
                answer = item.tickets
                error = error_from_wire(answer.error) if answer.HasField("error") else None
                self._producer.acceptances.answered(answer.acceptance, error)
            case _:
                self._refuse_unknown(item)

    def _refuse_unknown(self, item: stage_pb2.PutItem) -> None:
        """Rejects the flow to which an item of an unknown kind belongs.

        Does nothing if the producer has marked the item as ignorable. If the item belongs to no flow, raises
        UnsupportedError (UNKNOWN_KIND), which ends the stream.
        """
        error = unknown_kind(item, of=self._name)
        if error is None:
            return
        _log.warning("%s", error.message)
        if not item.HasField("key"):
            raise error
        self._reject(item.key, error)

    def _guarded(self, message: chunk_pb2.EdgeKey, process: Callable[..., None], item: object) -> None:
        """Calls `process(item)`. If an error is raised, rejects only the flow to which the item belongs.

        `message` is the key of this flow.
        """
        try:
            process(item)
        except StagemeshError as exc:
            # The frames of the traceback reference the item's data, and the flow stores the error.
            exc.__traceback__ = None
            self._reject(message, exc)
        except Exception:  # noqa: BLE001 - a defect in one flow must not block the stream, which others share
            _log.exception("edge %s cannot receive an item", message.edge)
            self._reject(message, InternalError(f"edge {message.edge} cannot receive an item; the log has the cause"))

    def _reject(self, message: chunk_pb2.EdgeKey, error: StagemeshError) -> None:
        """Rejects the flow with the key `message`, or asks the producer to reopen it if a message was lost."""
        key = wire.key_from_wire(message)
        error.located(edge=key.edge, request_id=key.request_id, replica=self._name)
        flow = self._flows.get(key)
        if flow is None or not self._check_carried(flow):
            rejected = stage_pb2.EdgeRejected(key=message, error=error_to_wire(error))
            self._reply(stage_pb2.PutReply(rejected=rejected))
        elif error.reason in _LOST_MESSAGE:
            flow.resync(error)
        else:
            del self._flows[key]
            flow.reject(error)

    def _flow(self, message: chunk_pb2.EdgeKey) -> InletAttempt | None:
        """Returns the flow to which an item belongs, or None if the item must be ignored. `message` is the flow's key.

        Raises InvalidChunkError (NOT_OPENED) if the flow's OpenEdge message was lost.
        """
        key = wire.key_from_wire(message)
        flow = self._flows.get(key)
        if flow is not None and self._check_carried(flow):
            return None if flow.phase is Phase.RESYNCING else flow
        if key in self._moved or self._is_committed(key, message):
            return None
        # The flow's OpenEdge was lost.
        flow = self._consumer.expected(key, self._producer)
        flow.attach(self._ready, incarnation=self._producer.incarnation, connector=GRPC)
        self._flows[key] = flow
        raise InvalidChunkError(f"edge {key.edge} was not opened", reason="NOT_OPENED")

    def _is_committed(self, key: EdgeKey, message: chunk_pb2.EdgeKey) -> bool:
        """Returns whether the flow was read to the end. If so, sends the commit message to the producer again."""
        is_committed = self._consumer.is_committed(key, self._producer)
        if is_committed:
            self._reply(stage_pb2.PutReply(commit=stage_pb2.EdgeCommit(key=message)))
        return is_committed

    def _open(self, message: stage_pb2.OpenEdge) -> None:
        key = wire.key_from_wire(message.key)
        self._moved.pop(key, None)
        if self._is_committed(key, message.key):
            return
        flow = self._consumer.expected(key, self._producer)
        connector = shown_name(message.connector)
        if connector != GRPC and not self._producer.has_negotiated(connector):
            raise unavailable(
                f"edge {key.edge} was opened with {connector}, which {self._producer.replica} and this "
                "replica have not negotiated"
            )
        self._flows[key] = flow
        self._transfers.drop(key)
        flow.attach(self._ready, incarnation=self._producer.incarnation, connector=connector)
        if connector == GRPC or self._producer.reader(connector) is not None:
            flow.confirm(message.opening)
        else:
            self._resync_failed(flow)

    def _resync_failed(self, flow: InletAttempt) -> None:
        """Asks the producer to reopen a flow, because the reader of the flow's connector has failed.

        The producer has not detected the failure yet.
        """
        error = UnavailableError(
            f"connector {flow.connector} with {self._producer.replica} has failed", reason="CONNECTOR_FAILED"
        )
        flow.resync(error, failed=flow.connector)

    def _demand(self, demand: stage_pb2.CreditDemand) -> None:
        flow = self._flow(demand.key)
        if flow is not None:
            flow.demand(demand.size_bytes)

    def _negotiate(self, offer: stage_pb2.Offer) -> None:
        if offer.connector not in self._negotiations:
            answering = self._loop.create_task(self._answer(offer), name=f"connector negotiation with {self._name}")
            self._negotiations[offer.connector] = answering
            answering.add_done_callback(lambda _: self._negotiations.pop(offer.connector))

    async def _answer(self, offer: stage_pb2.Offer) -> None:
        answer = stage_pb2.OfferAnswer(connector=offer.connector)
        try:
            arena_fd = self._local.arena_fd if self._local is not None else None
            name = name_of(offer.connector)
            if offer.name != name:
                raise unavailable(
                    f"{self._name} offers connector {offer.name[:64]!r} by the number of {name}; install the same "
                    "package on both replicas"
                )
            await self._producer.accept_offer(name, offer.offer, arena_fd=arena_fd)
        except StagemeshError as exc:
            answer.error.CopyFrom(error_to_wire(exc))
        self._reply(stage_pb2.PutReply(offer_answer=answer))

    # -- chunks

    def _fragment(self, fragment: fragments.Fragment) -> None:
        message = fragment.message
        flow = self._flow(message.key)
        if flow is None or not flow.check_seq(message.seq):
            return
        if not self._transfers.has_begun(flow.key, message.seq):
            flow.check_credit(message.seq, message.total_bytes)
            self._transfers.begin(flow.key, message)
        self._transfers.add(flow.key, fragment)

    def _chunk(self, chunk: chunk_pb2.Chunk) -> None:
        data = chunk.data if chunk.HasField("data") else None
        is_lease_used = False
        try:
            flow = self._flow(chunk.key)
            if flow is not None:
                is_lease_used = self._chunk_of(flow, chunk, data)
        finally:
            if data is not None and not is_lease_used:
                self._producer.release_unless_held(data.lease_id)

    def _chunk_of(self, flow: InletAttempt, chunk: chunk_pb2.Chunk, data: chunk_pb2.ChunkData | None) -> bool:
        """Delivers a chunk if it is the next expected chunk. Returns whether the chunk's lease is in use."""
        if not flow.check_seq(chunk.seq):
            return False
        if data is not None:
            return self._data(flow, chunk.seq, data)
        match chunk.WhichOneof("content"):
            case "end":
                flow.deliver_end(chunk.end)
            case "abort":
                flow.deliver_abort(error_from_wire(chunk.abort.error))
            case _:
                refuse_unknown(chunk, of=self._name)
                raise InvalidChunkError(f"chunk {chunk.seq} of edge {flow.key.edge} is empty")
        return False

    def _data(self, flow: InletAttempt, seq: int, data: chunk_pb2.ChunkData) -> bool:
        first_rows, overhead_bytes = wire.checked_head(data)
        flow.check_credit(seq, data.size_bytes, overhead_bytes=overhead_bytes)
        if not data.lease_id:
            packet = wire.packet_of(data, self._transfers.take(flow.key, seq, data), location="streamed")
            flow.deliver(packet, first_rows, overhead_bytes)
            return False
        if data.tensors and data.tensors[-1].HasField("handover"):
            flow.deliver(self._with_tickets(flow, data), first_rows, overhead_bytes)
            return True
        reader = self._producer.reader(flow.connector)
        if reader is None:
            if not self._producer.has_negotiated(flow.connector):
                for tensor in data.tensors:
                    refuse_unknown(tensor, of=self._name)
                raise InvalidChunkError("a chunk arrived by a connector that was not negotiated")
            self._resync_failed(flow)
            return False
        if isinstance(reader, InPlaceReader):
            packet, views = wire.read_in_place(data, reader)
            self._producer.hold(data.lease_id, views)
            flow.deliver(packet, first_rows, overhead_bytes)
        else:
            assert isinstance(reader, FetchingReader), "a reader reads in place or fetches"
            fetched = reader.fetch_at_once(wire.arena_ranges(data), flow.landing_account)
            if fetched is not None:
                flow.deliver(wire.packet_of(data, fetched, location="shm"), first_rows, overhead_bytes)
                return False
            self._producer.held_lease_ids.add(data.lease_id)
            fetching = self._loop.create_task(self._fetched(flow, reader, data), name=f"fetch of {flow.key.edge}")
            # A callback also runs if the task is cancelled before it begins.
            fetching.add_done_callback(lambda _: self._producer.release(data.lease_id))
            flow.deliver_later(
                fetching, size_bytes=data.size_bytes, first_rows=first_rows, overhead_bytes=overhead_bytes
            )
        return True

    def _with_tickets(self, flow: InletAttempt, data: chunk_pb2.ChunkData) -> Packet:
        """Returns the packet of a chunk with tickets, which retain the chunk's lease.

        Raises UnsupportedError (TICKET_REFUSED) if the reader does not accept the kind of a ticket.
        """
        handovers = [tensor.handover for tensor in data.tensors if tensor.HasField("handover")]
        accepted = flow.packets.ticket_kinds
        for handover in handovers:
            if handover.kind not in accepted:
                raise UnsupportedError(
                    f"a ticket is of kind {handover.kind[:64]!r}; this stage accepts {', '.join(accepted) or 'none'}",
                    reason="TICKET_REFUSED",
                )
        return wire.read_with_tickets(data, self._producer.hold_tickets(data.lease_id, len(handovers)))

    async def _fetched(self, flow: InletAttempt, reader: FetchingReader, data: chunk_pb2.ChunkData) -> Packet:
        """Fetches the bytes of a chunk and returns the chunk's packet. Drops the reader if the reader has failed.

        Raises UnavailableError if the bytes cannot be read.
        """
        try:
            fetched = await reader.fetch(wire.arena_ranges(data), flow.landing_account)
            return wire.packet_of(data, fetched, location="shm")
        except UnavailableError:
            # The failed reader is not used again, because the next offer creates a new reader.
            await self._producer.drop_reader(flow.connector, reader)
            raise
        except StagemeshError:
            raise
        except Exception as exc:
            # This is the outermost code of a task, and another package may have installed the connector.
            _log.exception("connector %s failed with an unexpected error", flow.connector)
            raise UnavailableError(
                f"connector {flow.connector} failed: a {type(exc).__name__}; the replica's log has the cause",
                reason="CONNECTOR_FAILED",
            ) from exc
