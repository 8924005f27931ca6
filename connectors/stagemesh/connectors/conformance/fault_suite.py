"""Tests of the guarantees D1, D4 and D6 with broken connections and restarted replicas."""

import asyncio

import pytest

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.connectors.conformance.proxies import Proxy, proxied
from stagemesh.connectors.conformance.replicas import Host, assert_same, open_flow, packet, receive_all, send_all
from stagemesh.connectors.conformance.suite import BOUND_S, Suite
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet

MIB = 1 << 20


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

            async with asyncio.timeout(BOUND_S):
                _, received = await asyncio.gather(send(), receive_all(inlet))
            assert_same(received, sent)
            await a.settled()
            await b.settled()

    async def test_view_outlives_its_connection(self) -> None:
        sent = [packet(seq, 50_000) for seq in range(10)]
        async with (
            self.hosts(arena_bytes=4 * MIB, window_bytes=MIB) as (a, b),
            proxied(b.endpoint) as (proxy, endpoint),
        ):
            outlet, inlet = open_flow(a, b, connector=self.connector, endpoint=endpoint)
            sender = asyncio.create_task(send_all(outlet, sent))
            async with asyncio.timeout(BOUND_S):
                held = (await anext(aiter(inlet))).tensors["x"]
                proxy.cut()
                assert_same(await receive_all(inlet), sent[1:])
                await sender
            await self.carry(a, b, [packet(seq, 50_000) for seq in range(100, 130)], request="r2")
            assert held.tobytes() == sent[0].tensors["x"].tobytes()
            del held
            await a.settled()
            await b.settled()

    async def test_restarted_consumer_fails_the_old_flow_and_accepts_new_ones(self) -> None:
        sent = [packet(seq, 100_000) for seq in range(10)]
        async with self.hosts() as (a, b), proxied(b.endpoint) as (proxy, endpoint):
            outlet, inlet = open_flow(a, b, connector=self.connector, endpoint=endpoint)
            await outlet.send(sent[0])
            await _first(inlet)
            successor = await _successor(b, proxy)
            try:
                with pytest.raises(UnavailableError, match="restarted"):
                    await _bounded_send(outlet, 100)
                await a.settled()
                outlet, inlet = open_flow(a, successor, request="r2", connector=self.connector, endpoint=endpoint)
                async with asyncio.timeout(BOUND_S):
                    _, received = await asyncio.gather(send_all(outlet, sent), receive_all(inlet))
                assert_same(received, sent)
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
                with pytest.raises(UnavailableError, match="chunk 1 of edge a->b"):
                    await _first(inlet)
                assert held == packet(50, 100_000).tensors["x"].tobytes()
                await inlet.aclose()
            finally:
                await successor.close()

    async def test_abort_arrives_after_what_was_sent(self) -> None:
        async with self.hosts() as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            await outlet.send(packet(0, 50_000))
            outlet.abort(InvalidRequestError("the engine refused", reason="BAD"))
            assert await _first(inlet) == packet(0, 50_000).tensors["x"].tobytes()
            with pytest.raises(InvalidRequestError, match="the engine refused"):
                await _first(inlet)
            await inlet.aclose()
            await a.settled()
            await b.settled()

    async def test_consumer_that_stops_reading_stops_the_producer(self) -> None:
        async with self.hosts(window_bytes=MIB) as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            await outlet.send(packet(0, 100_000))
            await _first(inlet)
            await inlet.aclose()
            with pytest.raises(StagemeshError, match="stopped reading"):
                await _bounded_send(outlet, 100)
            await a.settled()
            await b.settled()

    async def test_replicas_close_while_chunks_are_in_flight(self) -> None:
        for turns in (0, 1, 5, 50):
            async with self.hosts(window_bytes=MIB) as (a, b):
                outlet, inlet = open_flow(a, b, connector=self.connector)
                sender = asyncio.create_task(_bounded_send(outlet, 100))
                receiver = asyncio.create_task(receive_all(inlet))
                for _ in range(turns):
                    await asyncio.sleep(0.001)
                async with asyncio.timeout(BOUND_S):
                    await b.close()
                    await a.close()
                    await a.close()
                    for task in (sender, receiver):
                        with pytest.raises(UnavailableError):
                            await task


async def _first(inlet: Inlet) -> bytes:
    """Returns the bytes of the tensor of the inlet's next packet. Raises TimeoutError after BOUND_S seconds."""
    async with asyncio.timeout(BOUND_S):
        return (await anext(aiter(inlet))).tensors["x"].tobytes()


async def _bounded_send(outlet: Outlet, count: int) -> None:
    """Sends `count` packets and ends the flow.

    Raises TimeoutError after BOUND_S seconds, or the error if the flow fails.
    """
    async with asyncio.timeout(BOUND_S):
        await send_all(outlet, (packet(seq, 100_000) for seq in range(count)))


async def _successor(previous: Host, proxy: Proxy) -> Host:
    """Starts another incarnation of a consumer behind the same proxy, and cuts the proxy's open connections."""
    successor = await Host.started(previous.replica, inline_limit_bytes=0)
    proxy.target_port = int(successor.endpoint.rsplit(":", 1)[1])
    proxy.cut()
    return successor
