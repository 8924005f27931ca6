"""A connection of a link: its streams to one consumer, and the connectors that both replicas can use.

The main stream is the PutChunk stream that is opened first. If the consumer is on this host, a local stream carries the
flows that use a connector other than grpc. A bulk stream carries the flows whose large chunks are sent as fragments.
The bulk stream has its own network connection, so that these chunks do not delay the small chunks of other requests.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import grpc

from stagemesh.common.connector_descriptors import GRPC, ConnectorName
from stagemesh.common.errors import StagemeshError
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream import local_socket
from stagemesh.connectors.stream.negotiation import Negotiation
from stagemesh.connectors.stream.producer_session import ProducerSession
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.message_streams import ClientStream, LocalStream
from stagemesh.v1 import stage_pb2

_CHECK_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """The consumer of a link, and the Hello message and arena file descriptor that the producer sends."""

    consumer: str
    endpoint: str
    hello: stage_pb2.Hello
    arena_fd: int

    def __str__(self) -> str:
        return f"replica {self.consumer} at {self.endpoint}"


class Connection:
    """The streams to one consumer. Use it in `async with`, and call `connect`, `prepare` and `serve` in this order."""

    def __init__(
        self,
        peer: Peer,
        *,
        connectors: ReplicaConnectors,
        take_reply: Callable[[stage_pb2.PutReply], None],
        on_negotiated: Callable[[], None],
    ) -> None:
        self.watch: local_socket.DeathWatch | None = None
        """The watch on the consumer's process, or None if there is none. After `prepare`, the link owns the watch."""
        self._peer = peer
        self._connectors, self._take_reply, self._on_negotiated = connectors, take_reply, on_negotiated
        self._stack = contextlib.AsyncExitStack()
        self._main = ProducerSession(peer.consumer, take_reply)
        self._local: ProducerSession | None = None
        self._bulk: ProducerSession | None = None
        self._bulk_wanted = asyncio.Event()
        self._negotiation: Negotiation | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def connect(self) -> stage_pb2.Welcome:
        """Opens the main stream and returns the consumer's Welcome.

        Raises the error if the consumer rejects the stream.
        """
        return await self._open_grpc(self._main)

    async def prepare(self, welcome: stage_pb2.Welcome, *, with_local: bool, died: Callable[[], None]) -> None:
        """Opens the local stream if the consumer is on this host and `with_local` is set, and prepares negotiation.

        `died` is called when the consumer's process terminates, if that process is on this host. Raises the
        StagemeshError of a failed handshake.
        """
        if with_local and welcome.local_socket:
            self._local = await self._open_local(welcome, died)
        self._negotiation = Negotiation(
            self._connectors,
            consumer=self._peer.consumer,
            offer=(self._local or self._main).send,
            on_negotiated=self._on_negotiated,
        )
        self._stack.push_async_callback(self._negotiation.close)

    @property
    def negotiation(self) -> Negotiation:
        """The negotiation of connectors with this consumer. Available after `prepare`."""
        assert self._negotiation is not None, "prepare a connection before using it"
        return self._negotiation

    def stream(self, connector: ConnectorName, *, bulk: bool) -> ProducerSession | None:
        """Returns the stream for a flow with this connector, or None if the stream is not open yet.

        In the latter case, `on_negotiated` is called after the stream has been opened.
        """
        if connector != GRPC:
            return self._local or self._main
        if not bulk:
            return self._main
        self._bulk_wanted.set()
        return self._bulk

    async def serve(self, check: Callable[[], None]) -> StagemeshError:
        """Calls `check` about every _CHECK_S seconds until a stream ends, and returns the cause of its end.

        Opens the bulk stream when it is first needed.
        """
        ends = [self._end_of(stream) for stream in (self._main, self._local) if stream is not None]
        wanted = asyncio.create_task(self._bulk_wanted.wait())
        try:
            while True:
                await asyncio.wait((*ends, wanted), timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    if end.done():
                        return end.result()
                if wanted.done() and self._bulk is None:
                    bulk = ProducerSession(self._peer.consumer, self._take_reply)
                    await self._open_grpc(bulk)
                    self._bulk = bulk
                    ends.append(self._end_of(bulk))
                    wanted = asyncio.create_task(asyncio.Event().wait())
                    self._on_negotiated()
                check()
        finally:
            for task in (*ends, wanted):
                task.cancel()

    # -- inner workings

    @staticmethod
    def _end_of(stream: ProducerSession) -> asyncio.Task[StagemeshError]:
        return asyncio.create_task(stream.ended())

    async def _open_grpc(self, stream: ProducerSession) -> stage_pb2.Welcome:
        """Opens a stream on a new network connection and returns the consumer's Welcome."""
        channel: grpc.aio.Channel = await self._stack.enter_async_context(open_channel(self._peer.endpoint))
        messages = ClientStream(channel, stream, peer=str(self._peer))
        running = asyncio.create_task(messages.run())
        self._stack.push_async_callback(_cancel, running)
        self._stack.push_async_callback(stream.close)
        return await stream.connect(messages, self._peer.hello)

    async def _open_local(self, welcome: stage_pb2.Welcome, died: Callable[[], None]) -> ProducerSession | None:
        consumer = self._peer.consumer
        try:
            connection = await local_socket.dial(welcome.local_socket, arena_fd=self._peer.arena_fd)
        except OSError as exc:
            _log.info("%s is not on this host: %s", consumer, exc.strerror)
            return None
        watch = local_socket.watch_peer(connection, died)
        stream = ProducerSession(consumer, self._take_reply)
        _, messages = await asyncio.get_running_loop().create_unix_connection(
            lambda: LocalStream(stream, peer=f"replica {consumer}"), sock=connection
        )
        self._stack.push_async_callback(stream.close)
        try:
            answer = await stream.connect(messages, self._peer.hello)
            if answer.incarnation == welcome.incarnation:
                self.watch, watch = watch, None
                return stream
        finally:
            if watch is not None:
                watch.close()
        _log.warning("the local socket that %s reported belongs to another process", consumer)
        await stream.close()
        return None


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
