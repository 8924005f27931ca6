"""Tests of a connector with broken connections and restarted replicas.

The tests check that chunks arrive exactly once and in order, that no task waits forever, and that previous incarnations
of a replica are rejected. The producer reaches the consumer through a `Proxy`, which breaks connections.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.conformance.replicas import (
    Host,
    assert_same,
    exchange,
    open_flow,
    open_outlet,
    packet,
    receive_all,
    send_all,
)
from stagemesh.conformance.suite import BOUND_S, Suite
from stagemesh.connectors import peer_timeouts
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet

MIB = 1 << 20


class Proxy:
    """A TCP proxy. `cut` resets the open connections. Later connections are still accepted."""

    def __init__(self, *targets: str) -> None:
        self.targets = list(targets)
        """The endpoints, "host:port", to which connections lead in turn. A test may change the list."""
        self._connections = itertools.count()
        self._writers: set[asyncio.StreamWriter] = set()
        self._running = 0
        self.forwarded_bytes = 0
        self.cut_at_bytes: list[int] = []
        """The numbers of forwarded bytes at which the proxy cuts all connections, in ascending order."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays one connection to a target until the connection ends."""
        self._running += 1
        try:
            async with _closing(writer):
                with suppress(OSError):
                    await self._relay(reader, writer)
        finally:
            self._running -= 1

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.targets[next(self._connections) % len(self.targets)].rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        async with _closing(upstream_writer):
            ends = {writer, upstream_writer}
            self._writers |= ends
            pumps = self._pump(reader, upstream_writer), self._pump(upstream_reader, writer)
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= ends

    async def close(self) -> None:
        """Cuts all connections and waits until they have ended."""
        # A newly accepted connection starts within a few iterations of the event loop.
        for _ in range(10):
            await asyncio.sleep(0)
        self.cut()
        while self._running:
            await asyncio.sleep(0)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(16 << 10):
            self.forwarded_bytes += len(data)
            if self.cut_at_bytes and self.forwarded_bytes >= self.cut_at_bytes[0]:
                self.cut_at_bytes.pop(0)
                self.cut()
                return
            writer.write(data)
            await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Resets all open connections."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def proxied(*targets: str) -> AsyncGenerator[tuple[Proxy, str]]:
    """Starts a proxy for the given "host:port" endpoints. Yields the proxy and the proxy's own endpoint."""
    proxy = Proxy(*targets)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy, f"127.0.0.1:{port}"
        # Stops accepting connections first. Otherwise, asyncio would leave a connection open if it has no transport yet
        # when the server closes.
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await proxy.close()


class FaultSuite(Suite):
    """Tests that break connections, restart replicas, and stop producers and consumers."""

    @pytest.mark.parametrize("size", [100, 30_000, 400_000])
    async def test_cut_connections_lose_and_repeat_nothing(self, size: int) -> None:
        sent = [packet(seq, size) for seq in range(20)]
        total = sum(one.size_bytes for one in sent)
        async with self.hosts() as (a, b), proxied(b.endpoint) as (proxy, endpoint):
            # If the connector's bytes bypass the proxy, only the cuts between chunks happen.
            proxy.cut_at_bytes = [total * part // 10 for part in (2, 5, 8)]
            outlet, inlet = open_flow(a, b, connector=self.connector, endpoint=endpoint)

            async def send() -> None:
                for seq, one in enumerate(sent):
                    await outlet.send(one)
                    if seq % 6 == 5:
                        proxy.cut()
                await outlet.finish()

            _, received = await asyncio.gather(send(), receive_all(inlet))
            assert_same(received, sent)
            await asyncio.gather(a.settled(), b.settled())

    async def test_view_outlives_its_connection(self) -> None:
        sent = [packet(seq, 50_000) for seq in range(10)]
        async with (
            self.hosts(arena_bytes=4 * MIB, window_bytes=MIB) as (a, b),
            proxied(b.endpoint) as (proxy, endpoint),
        ):
            outlet, inlet = open_flow(a, b, connector=self.connector, endpoint=endpoint)
            sender = asyncio.create_task(send_all(outlet, sent))
            held = (await anext(aiter(inlet))).tensors["x"]
            proxy.cut()
            assert_same(await receive_all(inlet), sent[1:])
            await sender
            later = [packet(seq, 50_000) for seq in range(100, 130)]
            assert_same(await self.carry(a, b, later, request="r2", endpoint=endpoint), later)
            assert held.tobytes() == sent[0].tensors["x"].tobytes()
            del held
            await asyncio.gather(a.settled(), b.settled())

    async def test_restarted_consumer_fails_the_old_flow_and_accepts_new_ones(self) -> None:
        sent = [packet(seq, 100_000) for seq in range(10)]
        async with self.hosts() as (a, b), proxied(b.endpoint) as (proxy, endpoint):
            outlet, inlet = open_flow(a, b, connector=self.connector, endpoint=endpoint)
            await outlet.send(sent[0])
            await _first(inlet)
            successor = await _successor(b, proxy)
            try:
                with pytest.raises(UnavailableError, match="restarted"):
                    await _send(outlet, 100)
                await a.settled()
                outlet, inlet = open_flow(a, successor, request="r2", connector=self.connector, endpoint=endpoint)
                assert_same(await exchange(outlet, inlet, sent), sent)
            finally:
                await successor.close()

    async def test_restarted_producer_is_never_taken_for_its_previous_incarnation(self) -> None:
        sent = [packet(seq, 100_000) for seq in range(10)]
        async with self.hosts() as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            await outlet.send(packet(50, 100_000))
            held = await _first(inlet)
            await a.close()
            successor = await Host.started("a-0", inline_limit_bytes=0)
            try:
                assert_same(await self.carry(successor, b, sent, request="r2"), sent)
                with pytest.raises(StagemeshError) as rejected:
                    await _send(open_outlet(successor, b, connector=self.connector), 1)
                assert rejected.value.reason == "STALE_INCARNATION"
                with pytest.raises(UnavailableError, match="chunk 1 of edge a->b"):
                    await _first(inlet)
                assert held == packet(50, 100_000).tensors["x"].tobytes()
                await inlet.aclose()
            finally:
                await successor.close()

    async def test_abort_arrives_after_what_was_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Only the acknowledgement of the Abort message frees the producer's memory.
        monkeypatch.setattr(peer_timeouts, "REOPEN_S", BOUND_S)
        async with self.hosts() as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            await outlet.send(packet(0, 50_000))
            outlet.abort(InvalidRequestError("the engine refused"))
            assert await _first(inlet) == packet(0, 50_000).tensors["x"].tobytes()
            with pytest.raises(InvalidRequestError, match="the engine refused"):
                await _first(inlet)
            await inlet.aclose()
            await asyncio.gather(a.settled(), b.settled())

    async def test_consumer_that_stops_reading_stops_the_producer(self) -> None:
        async with self.hosts(window_bytes=MIB) as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            await outlet.send(packet(0, 100_000))
            await _first(inlet)
            await inlet.aclose()
            with pytest.raises(StagemeshError, match="stopped reading"):
                await _send(outlet, 100)
            await asyncio.gather(a.settled(), b.settled())

    @pytest.mark.parametrize("turns", [0, 1, 5, 50])
    async def test_replicas_close_while_chunks_are_in_flight(self, turns: int) -> None:
        async with self.hosts(window_bytes=MIB) as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            sender = asyncio.create_task(_send(outlet, 100))
            receiver = asyncio.create_task(receive_all(inlet))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            await b.close()
            await a.close()
            await a.close()
            for task in (sender, receiver):
                with pytest.raises(UnavailableError):
                    await task


async def _first(inlet: Inlet) -> bytes:
    """Returns the bytes of the tensor "x" of the inlet's next packet."""
    return (await anext(aiter(inlet))).tensors["x"].tobytes()


async def _send(outlet: Outlet, count: int) -> None:
    """Sends `count` packets and ends the flow. Raises the flow's error if the flow fails."""
    await send_all(outlet, (packet(seq, 100_000) for seq in range(count)))


async def _successor(previous: Host, proxy: Proxy) -> Host:
    """Starts another incarnation of a consumer behind the same proxy. Cuts all open connections of the proxy.

    The caller must close the returned host.
    """
    successor = await Host.started(previous.replica, inline_limit_bytes=0)
    proxy.targets[:] = [successor.endpoint]
    proxy.cut()
    return successor
