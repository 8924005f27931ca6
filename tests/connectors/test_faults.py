"""Broken connections and restarted replicas: D1, D4, D6."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from stagemesh.connectors.base import AUTO, GRPC, SHM, ConnectorName, EdgeKey, Inlet, Outlet, StepPolicy
from stagemesh.connectors.errors import UnavailableError
from tests.connectors.hosts import Host, packet, two_hosts
from tests.connectors.proxies import proxied

KEY = EdgeKey("r", "a->b", 1)


def _open(a: Host, b: Host, endpoint: str, connector: ConnectorName) -> tuple[Outlet, Inlet]:
    inlet = b.plane.open_inlet(KEY, producer="a-0")
    outlet = a.plane.open_outlet(KEY, endpoint=endpoint, consumer="b-0", connector=connector, policy=StepPolicy())
    return outlet, inlet


async def _send(outlet: Outlet, count: int, size: int, cut: Callable[[], None] | None = None) -> None:
    for seq in range(count):
        await outlet.send(packet(seq, size))
        if cut is not None and seq % 6 == 5:
            cut()
    await outlet.finish()


async def _check(inlet: Inlet, count: int, size: int) -> None:
    seen = 0
    async for got in inlet:
        assert got.metadata["seq"] == seen
        assert (got.tensors["x"] == packet(seen, size).tensors["x"]).all()
        seen += 1
    assert seen == count
    await inlet.aclose()


@pytest.mark.parametrize("size", [100, 30_000, 400_000])
@pytest.mark.parametrize("connector", [SHM, GRPC])
async def test_cut_connections_lose_and_repeat_nothing(connector: ConnectorName, size: int) -> None:
    async with two_hosts() as (a, b), proxied(b.endpoint) as (proxy, endpoint):
        on_the_wire = 20 * (size * 4 if connector == GRPC or size <= 1000 else 400)
        proxy.cut_at_bytes = [on_the_wire * part // 10 for part in (2, 5, 8)]
        outlet, inlet = _open(a, b, endpoint, connector)
        # Chunks of shm go past the proxy: cutting its connection breaks the link all the same.
        cut = proxy.cut if connector == SHM else None
        await asyncio.gather(_send(outlet, 20, size, cut), _check(inlet, 20, size))
        assert proxy.cuts >= 1
        async with asyncio.timeout(5):
            while a.plane.arena_used_bytes:
                gc.collect()
                await asyncio.sleep(0)


async def test_consumer_that_was_restarted_fails_the_old_flow() -> None:
    async with two_hosts() as (a, b), proxied(b.endpoint) as (proxy, endpoint):
        outlet, _ = _open(a, b, endpoint, AUTO)
        await outlet.send(packet(0, 100_000))
        async with asyncio.timeout(5):
            while b.plane.find(KEY).next_seq < 1:  # type: ignore[union-attr]
                await asyncio.sleep(0)
        successor = await Host.started("b-0")
        proxy.target_port = int(successor.endpoint.rsplit(":", 1)[1])
        proxy.cut()
        with pytest.raises(UnavailableError, match="restarted"):
            await _send(outlet, 100, 100_000)
        assert a.plane.arena_used_bytes == 0
        await successor.close()


async def test_producer_that_was_restarted_fails_its_old_flow() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = _open(a, b, b.endpoint, AUTO)
        await outlet.send(packet(0))
        packets = aiter(inlet)
        await anext(packets)
        await a.plane.close()
        successor = await Host.started("a-0")
        other = b.plane.open_inlet(EdgeKey("r2", "a->b", 1), producer="a-0")
        flow = successor.plane.open_outlet(
            EdgeKey("r2", "a->b", 1),
            endpoint=b.endpoint,
            consumer="b-0",
            connector=AUTO,
            policy=StepPolicy(),
        )
        with pytest.raises(UnavailableError, match="chunk 1 of edge a->b"):
            await anext(packets)
        await asyncio.gather(_send(flow, 3, 100_000), _check(other, 3, 100_000))
        await successor.close()
