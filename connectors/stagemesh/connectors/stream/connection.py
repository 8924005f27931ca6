"""A connection of a link: its streams to one consumer, and what both sides can use.

The main stream is the PutChunk stream that everything begins with. A local stream beside it, to a consumer on this
host, carries what goes by the arena. A bulk stream, on a network connection of its own, carries the flows whose large
chunks go in pieces, so that they do not stand before other requests' small ones.
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

_LOOK_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """The consumer of a link, and what it is told of its producer."""

    consumer: str
    endpoint: str
    hello: stage_pb2.Hello
    arena_fd: int

    def __str__(self) -> str:
        return f"replica {self.consumer} at {self.endpoint}"


class Connection:
    """Open within `async with`; then `serve` it."""

    def __init__(
        self,
        peer: Peer,
        *,
        connectors: ReplicaConnectors,
        take_reply: Callable[[stage_pb2.PutReply], None],
        settled: Callable[[], None],
    ) -> None:
        self.watch: local_socket.DeathWatch | None = None
        """On the consumer's process, where it is on this host. The link takes it over."""
        self._peer = peer
        self._connectors, self._take_reply, self._settled = connectors, take_reply, settled
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

    async def greet(self) -> stage_pb2.Welcome:
        """Opens the main stream; raises what the consumer refused it with."""
        return await self._open_grpc(self._main)

    async def settle(self, welcome: stage_pb2.Welcome, *, with_local: bool, died: Callable[[], None]) -> None:
        """Opens the local stream, where the consumer is on this host and `with_local`; flows can be opened then.

        Raises the StagemeshError that its greeting failed with.
        """
        if with_local and welcome.local_socket:
            self._local = await self._open_local(welcome, died)
        self._negotiation = Negotiation(
            self._connectors,
            consumer=self._peer.consumer,
            offer=(self._local or self._main).send,
            settled=self._settled,
        )
        self._stack.push_async_callback(self._negotiation.close)

    @property
    def negotiation(self) -> Negotiation:
        """What both sides can use."""
        assert self._negotiation is not None, "a connection is settled before it is used"
        return self._negotiation

    def stream(self, connector: ConnectorName, *, bulk: bool) -> ProducerSession | None:
        """The stream for a flow; None while it is being opened, after which `settled` is called."""
        if connector != GRPC:
            return self._local or self._main
        if not bulk:
            return self._main
        self._bulk_wanted.set()
        return self._bulk

    async def serve(self, look: Callable[[], None]) -> StagemeshError:
        """Why the first of the streams ended; calls `look` every moment until then."""
        ends = [self._end_of(stream) for stream in (self._main, self._local) if stream is not None]
        wanted = asyncio.create_task(self._bulk_wanted.wait())
        try:
            while True:
                await asyncio.wait((*ends, wanted), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    if end.done():
                        return end.result()
                if wanted.done() and self._bulk is None:
                    bulk = ProducerSession(self._peer.consumer, self._take_reply)
                    await self._open_grpc(bulk)
                    self._bulk = bulk
                    ends.append(self._end_of(bulk))
                    wanted = asyncio.create_task(asyncio.Event().wait())
                    self._settled()
                look()
        finally:
            for task in (*ends, wanted):
                task.cancel()

    # -- inner workings

    @staticmethod
    def _end_of(stream: ProducerSession) -> asyncio.Task[StagemeshError]:
        return asyncio.create_task(stream.ended())

    async def _open_grpc(self, stream: ProducerSession) -> stage_pb2.Welcome:
        """Begins a stream on a network connection of its own."""
        channel: grpc.aio.Channel = await self._stack.enter_async_context(open_channel(self._peer.endpoint))
        lane = ClientStream(channel, stream, peer=str(self._peer))
        carrying = asyncio.create_task(lane.run())
        self._stack.push_async_callback(_ended, carrying)
        self._stack.push_async_callback(stream.close)
        return await stream.greet(lane, self._peer.hello)

    async def _open_local(self, welcome: stage_pb2.Welcome, died: Callable[[], None]) -> ProducerSession | None:
        consumer = self._peer.consumer
        try:
            connection = await local_socket.dial(welcome.local_socket, arena_fd=self._peer.arena_fd)
        except OSError as exc:
            _log.info("%s is not on this host: %s", consumer, exc.strerror)
            return None
        watch = local_socket.watch_peer(connection, died)
        stream = ProducerSession(consumer, self._take_reply)
        _, lane = await asyncio.get_running_loop().create_unix_connection(
            lambda: LocalStream(stream, peer=f"replica {consumer}"), sock=connection
        )
        self._stack.push_async_callback(stream.close)
        try:
            found = await stream.greet(lane, self._peer.hello)
            if found.incarnation == welcome.incarnation:
                self.watch, watch = watch, None
                return stream
        finally:
            if watch is not None:
                watch.close()
        _log.warning("somebody else is at the local socket that %s named", consumer)
        await stream.close()
        return None


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
