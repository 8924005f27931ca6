"""The connection of a link to one consumer: its streams, over which the replicas also agree on connectors.

The main stream is the PutChunk stream that is opened first. If the consumer is on this host, a local stream carries the
flows that use a connector other than grpc. A bulk stream carries the flows whose large chunks are sent as fragments.
The bulk stream has its own network connection, so that these chunks do not delay the small chunks of other requests.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from stagemesh.common.errors import InternalError, InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import GRPC, ConnectorName
from stagemesh.common.tasks import end_tasks
from stagemesh.common.wire.encoding import parse_message
from stagemesh.common.wire.versions import OFFERS
from stagemesh.connectors.flow.flow_control import ReadyQueue
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.stream import local_socket
from stagemesh.connectors.stream.connector_agreement import ConnectorAgreement, Peer
from stagemesh.rpc.channels import MAX_ANSWER_FIELDS, open_channel
from stagemesh.rpc.message_streams import ClientStream, LocalStream, MessageStream
from stagemesh.v1 import stage_pb2

_HANDSHAKE_S = 5.0
_CLOSING_S = 1.0
_MESSAGE_BYTES = 256 << 10
_QUANTUM_BYTES = 64 << 10
_CHECK_S = 0.5
_MAX_UNSENT = 4096
"""The maximum number of items that wait in a session when it answers a consumer, which may not read."""
_MAX_LOCAL_FAILURES = 3
"""The number of consecutive failed handshakes over the local socket after which the link no longer uses the socket."""

TakeReply: TypeAlias = Callable[[stage_pb2.PutReply], stage_pb2.PutItem | None]

_log = logging.getLogger(__name__)


class ProducerSession:
    """The producer side of one stream. Sends messages to a consumer, and the answers of `take_reply` to its replies.

    A message combines the items of all outlets that became ready in the same iteration of the event loop.
    """

    def __init__(self, consumer: str, take_reply: TakeReply) -> None:
        self._consumer = consumer
        self._take_reply = take_reply
        loop = asyncio.get_running_loop()
        self._stream: MessageStream | None = None
        self._items: deque[stage_pb2.PutItem] = deque()
        self.ready = ReadyQueue[OutletAttempt](self.writable)
        """The outlet attempts that have messages to send."""
        self._welcome: asyncio.Future[stage_pb2.Welcome] = loop.create_future()
        self.ended: asyncio.Future[StagemeshError] = loop.create_future()
        """A future that completes when the stream has ended. The result is the error that ended the stream."""

    async def connect(self, stream: MessageStream, hello: stage_pb2.Hello) -> stage_pb2.Welcome:
        """Sends Hello over `stream` and returns the consumer's Welcome.

        Raises the consumer's error if the consumer rejects the stream. Raises UnavailableError if the consumer does not
        answer within _HANDSHAKE_S seconds.
        """
        self._stream = stream
        stream.write(stage_pb2.PutChunkRequest(hello=hello).SerializeToString())
        await asyncio.wait((self._welcome, self.ended), return_when=asyncio.FIRST_COMPLETED, timeout=_HANDSHAKE_S)
        if self.ended.done():
            raise self.ended.result()
        if not self._welcome.done():
            raise UnavailableError(
                f"replica {self._consumer} did not answer within {_HANDSHAKE_S:g} s", reason="NO_ANSWER"
            )
        return self._welcome.result()

    async def close(self) -> None:
        """Drops all unsent items and ends the stream. Idempotent."""
        self.ready.take_all()
        self._items.clear()
        if self._stream is not None:
            self._stream.close()
            await asyncio.wait((self.ended,), timeout=_CLOSING_S)

    def send(self, item: stage_pb2.PutItem) -> None:
        """Queues an item. Queued items are sent before the items of the outlets."""
        self._items.append(item)
        self.ready.wake()

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        """Passes the replies in a serialized message to `take_reply`. Completes `connect` when Welcome arrives.

        Raises InternalError if the message cannot be parsed, or if the consumer does not read the answers.
        """
        try:
            response = parse_message(stage_pb2.PutChunkResponse, data, max_fields=MAX_ANSWER_FIELDS)
        except InvalidRequestError as exc:
            raise InternalError(f"replica {self._consumer} sent an answer that cannot be read: {exc.message}") from exc
        if response.HasField("welcome") and not self._welcome.done():
            self._welcome.set_result(response.welcome)
        for reply in response.replies:
            answer = self._take_reply(reply)
            if answer is not None:
                if len(self._items) >= _MAX_UNSENT:
                    raise InternalError(f"the consumer does not read {_MAX_UNSENT} answers to its replies")
                self.send(answer)

    def writable(self) -> None:
        """Sends the waiting messages. Called when the stream can accept data again, and when there is a message."""
        while self._stream is not None and self._stream.is_writable and (data := self._next_message()):
            self._stream.write(data)

    def closed(self, error: StagemeshError | None) -> None:
        """Ends the session. Called when the stream has ended.

        `error` is the cause, or None if the consumer ended the stream normally.
        """
        self._stream = None
        self.ready.take_all()
        if not self.ended.done():
            self.ended.set_result(
                error or UnavailableError(f"replica {self._consumer} ended the stream", reason="CONNECTION_LOST")
            )

    # -- inner workings

    def _next_message(self) -> bytes:
        """Returns the next serialized message, or b"" if there is nothing to send.

        Each outlet adds about _QUANTUM_BYTES of items to a message, so that a large chunk of one outlet does not delay
        the other outlets.
        """
        request = stage_pb2.PutChunkRequest(items=self._items)
        self._items.clear()
        budget_bytes = _MESSAGE_BYTES
        while budget_bytes > 0 and (outlet := self.ready.first()) is not None:
            fragment = b""
            if outlet.has_messages:
                sends_fragment = outlet.sends_fragments
                if sends_fragment and request.items:
                    # A fragment must be the first item of its message.
                    break
                try:
                    if sends_fragment:
                        fragment = outlet.take_fragment()
                    else:
                        budget_bytes -= outlet.fill(request, _QUANTUM_BYTES)
                except Exception:  # noqa: BLE001 - a defect in one flow must not block the stream, which others share
                    _log.exception("edge %s cannot send a chunk", outlet.key.edge)
                    outlet.fail(InternalError(f"edge {outlet.key.edge} cannot send a chunk; the log has the cause"))
                    del request.items[-1:]
            if outlet.has_messages:
                self.ready.rotate(outlet)
            else:
                self.ready.discard(outlet)
            if fragment:
                return fragment
        return request.SerializeToString()


class Connection:
    """The streams to one consumer. `agreement` has the connectors on which both replicas have agreed.

    Call `connect`, `open_local` and `serve` in this order, within `contextlib.aclosing`. The connection calls
    `on_negotiated` when a connector or stream has become usable, or when a connector has been rejected.
    """

    def __init__(self, peer: Peer, *, take_reply: TakeReply, on_negotiated: Callable[[], None]) -> None:
        self._peer = peer
        self._take_reply, self._on_negotiated = take_reply, on_negotiated
        self._stack = contextlib.AsyncExitStack()
        self._main = ProducerSession(peer.consumer, take_reply)
        self._local: ProducerSession | None = None
        self._bulk: ProducerSession | None = None
        self._bulk_wanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.agreement = ConnectorAgreement(peer, send_offer=self._send_offer, on_change=on_negotiated)

    async def aclose(self) -> None:
        """Ends the negotiations and all streams."""
        try:
            await self.agreement.close()
        finally:
            await self._stack.aclose()

    async def connect(self) -> stage_pb2.Welcome:
        """Opens the main stream and returns the consumer's Welcome.

        Raises the consumer's error if the consumer rejects the stream. Raises UnavailableError if the consumer does not
        answer within _HANDSHAKE_S seconds.
        """
        welcome = await self._open_grpc(self._main)
        if OFFERS not in welcome.protocol.features:
            self.agreement.refuse_all(f"{self._peer} does not support offers of arenas")
        return welcome

    async def open_local(
        self, welcome: stage_pb2.Welcome, *, died: Callable[[], None]
    ) -> local_socket.DeathWatch | None:
        """Opens a local stream if the consumer is on this host. Returns a watch on the consumer's process.

        Returns None if the consumer is on another host, if the system does not allow watching the process, or after
        _MAX_LOCAL_FAILURES consecutive failed handshakes. The caller must close the watch. Raises a StagemeshError if
        the handshake fails.

        Args:
            welcome: The consumer's Welcome message on the main stream.
            died: Called when the consumer's process terminates.
        """
        peer = self._peer
        if not welcome.local_socket or peer.local_failures >= _MAX_LOCAL_FAILURES:
            return None
        try:
            connection = await local_socket.dial(welcome.local_socket, arena_fd=peer.arena_fd)
        except OSError as exc:
            _log.info("%s is not on this host: %s", peer.consumer, exc.strerror)
            return None
        peer.local_failures += 1
        stream = ProducerSession(peer.consumer, self._take_reply)
        _, messages = await asyncio.get_running_loop().create_unix_connection(
            lambda: LocalStream(stream, peer=f"replica {peer.consumer}"), sock=connection
        )
        self._stack.push_async_callback(stream.close)
        hello = stage_pb2.Hello(local_secret=welcome.local_secret)
        hello.MergeFrom(peer.hello)
        answer = await stream.connect(messages, hello)
        if answer.incarnation != welcome.incarnation:
            _log.warning("the local socket that %s reported belongs to another process", peer.consumer)
            await stream.close()
            return None
        peer.local_failures = 0
        self._local = stream
        return local_socket.watch_peer(connection, died)

    def stream(self, connector: ConnectorName, *, bulk: bool) -> ProducerSession | None:
        """Returns the stream for a flow that uses `connector`, or None if the stream is not open yet.

        `bulk` is whether the flow has large chunks that are sent as fragments. The first call for such a flow requests
        the bulk stream. `on_negotiated` is called when the bulk stream is open.
        """
        if connector != GRPC:
            return self._local or self._main
        if not bulk:
            return self._main
        if not self._bulk_wanted.done():
            self._bulk_wanted.set_result(None)
        return self._bulk

    async def serve(self, check: Callable[[], None]) -> StagemeshError:
        """Calls `check` about every _CHECK_S seconds until a stream ends. Returns the error that ended the stream.

        Opens the bulk stream when a flow first needs this stream.
        """
        while True:
            ends = [stream.ended for stream in (self._main, self._local, self._bulk) if stream is not None]
            events: list[asyncio.Future[Any]] = [*ends]
            if self._bulk is None:
                events.append(self._bulk_wanted)
            await asyncio.wait(events, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    return end.result()
            if self._bulk_wanted.done() and self._bulk is None:
                bulk = ProducerSession(self._peer.consumer, self._take_reply)
                await self._open_grpc(bulk)
                self._bulk = bulk
                self._on_negotiated()
            check()

    # -- inner workings

    def _send_offer(self, item: stage_pb2.PutItem) -> None:
        """Sends an offer over the local stream if there is one, which carries the arena's descriptor."""
        (self._local or self._main).send(item)

    async def _open_grpc(self, stream: ProducerSession) -> stage_pb2.Welcome:
        """Opens `stream` on a new network connection and returns the consumer's Welcome."""
        address = self._peer.address
        opening = open_channel(address.endpoint, server_name=address.server_name)
        channel: grpc.aio.Channel = await self._stack.enter_async_context(opening)
        messages = ClientStream(channel, stream, peer=str(self._peer))
        running = asyncio.create_task(messages.run())
        self._stack.push_async_callback(end_tasks, (running,))
        self._stack.push_async_callback(stream.close)
        return await stream.connect(messages, self._peer.hello)
