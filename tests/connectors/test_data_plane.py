"""One edge between two data planes: every promise of D1, D2, D3, D4, D6."""

import asyncio
import gc

import numpy as np
import pytest

from stagemesh.connectors.base import (
    AUTO,
    GRPC,
    SHM,
    ConnectorName,
    EdgeKey,
    FramesPolicy,
    Inlet,
    Outlet,
    Packet,
    StepPolicy,
    WholePolicy,
)
from stagemesh.connectors.errors import InvalidRequestError, NotReadyError, StagemeshError, UnavailableError
from tests.connectors.hosts import Host, open_flow, packet, two_hosts

BOTH = pytest.mark.parametrize("connector", [SHM, GRPC])


async def _send(outlet: Outlet, count: int, size: int) -> None:
    for seq in range(count):
        await outlet.send(packet(seq, size))
    await outlet.finish()


async def _receive(inlet: Inlet) -> list[Packet]:
    """Copies of all packets: who keeps the views keeps the producer's arena full."""
    received = [Packet({n: t.copy() for n, t in got.tensors.items()}, got.metadata) async for got in inlet]
    await inlet.aclose()
    return received


def _assert_same(received: list[Packet], count: int, size: int) -> None:
    assert [got.metadata["seq"] for got in received] == list(range(count))
    for seq, got in enumerate(received):
        for name, tensor in packet(seq, size).tensors.items():
            np.testing.assert_array_equal(got.tensors[name], tensor)


@BOTH
@pytest.mark.parametrize("size", [0, 1, 1000, 300_000, 1_500_000])
async def test_every_chunk_arrives_once_in_order(connector: ConnectorName, size: int) -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=connector)
        _, received = await asyncio.gather(_send(outlet, 5, size), _receive(inlet))
        _assert_same(received, 5, size)
        assert outlet.usage.connector == connector
        assert outlet.usage.chunks == 5


async def _settled(host: Host) -> None:
    """Returns when nothing is left in a host's arena."""
    async with asyncio.timeout(5):
        while host.plane.arena_used_bytes:
            gc.collect()
            await asyncio.sleep(0)


@BOTH
async def test_arena_is_empty_after_the_flow(connector: ConnectorName) -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=connector)
        await asyncio.gather(_send(outlet, 20, 100_000), _receive(inlet))
        await _settled(a)
        assert b.plane.credit_bytes == 0


async def test_request_id_can_be_used_again() -> None:
    async with two_hosts() as (a, b):
        for _ in range(2):
            outlet, inlet = open_flow(a, b)
            _, received = await asyncio.gather(_send(outlet, 3, 1000), _receive(inlet))
            assert len(received) == 3
            await _settled(a)


async def test_view_keeps_its_region_until_it_is_dropped() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b)
        sender = asyncio.create_task(_send(outlet, 1, 100_000))
        part = (await anext(aiter(inlet))).tensors["x"][50_000:]
        await sender
        assert await _receive(inlet) == []
        assert a.plane.arena_used_bytes > 0
        assert not part.flags.writeable
        np.testing.assert_array_equal(part, packet(0, 100_000).tensors["x"][50_000:])
        del part
        await _settled(a)


async def test_auto_chooses_shm_on_one_host() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b)
        await asyncio.gather(_send(outlet, 1, 100_000), _receive(inlet))
        assert outlet.usage.connector == SHM


async def test_slow_consumer_holds_the_producer_back() -> None:
    async with two_hosts(window_bytes=1 << 20) as (a, b):
        outlet, inlet = open_flow(a, b)
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(_send(outlet, 40, 100_000))
            packets = aiter(inlet)
            first = await anext(packets)
            assert first.metadata["seq"] == 0
            while a.plane.arena_used_bytes < 1 << 20:
                await asyncio.sleep(0)
            assert outlet.usage.size_bytes <= (1 << 20) + 2 * 400_008
            assert not sender.done()
            del first
            assert len(await _receive(inlet)) == 39


@BOTH
async def test_full_arena_is_backpressure(connector: ConnectorName) -> None:
    async with two_hosts(arena_bytes=1 << 20, window_bytes=1 << 20) as (a, b):
        outlet, inlet = open_flow(a, b, connector=connector)
        _, received = await asyncio.gather(_send(outlet, 30, 60_000), _count(inlet))
        assert received == 30


async def _count(inlet: Inlet) -> int:
    count = 0
    async for got in inlet:
        assert got.metadata["seq"] == count
        count += 1
        del got
    await inlet.aclose()
    return count


@BOTH
async def test_chunk_beyond_the_window_is_granted_alone(connector: ConnectorName) -> None:
    async with two_hosts(window_bytes=1 << 20) as (a, b):
        outlet, inlet = open_flow(a, b, connector=connector, policy=WholePolicy())
        pieces = [Packet({"x": np.full(100_000, n, np.float32)}) for n in range(12)]
        _, received = await asyncio.gather(_send_all(outlet, pieces), _receive(inlet))
        assert [got.tensors["x"].shape for got in received] == [(1_200_000,)]
        assert received[0].tensors["x"].sum() == 100_000 * sum(range(12))


async def _send_all(outlet: Outlet, packets: list[Packet]) -> None:
    for one in packets:
        await outlet.send(one)
    await outlet.finish()


async def test_chunk_beyond_the_arena_is_refused_with_the_remedy() -> None:
    async with two_hosts(arena_bytes=1 << 20, window_bytes=1 << 20) as (a, b):
        outlet, _ = open_flow(a, b)
        with pytest.raises(InvalidRequestError, match="frames"):
            await outlet.send(packet(0, 1_000_000))


async def test_frames_policy_cuts_across_packets() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, policy=FramesPolicy(4, initial_frames=2, left_context_frames=1))
        packets = [Packet({"x": np.arange(n * 5, n * 5 + 5)}) for n in range(3)]
        _, received = await asyncio.gather(_send_all(outlet, packets), _receive(inlet))
        assert [got.tensors["x"].tolist() for got in received] == [
            [0, 1],
            [1, 2, 3, 4, 5],
            [5, 6, 7, 8, 9],
            [9, 10, 11, 12, 13],
            [13, 14],
        ]
        assert [got.metadata["context_frames"] for got in received] == [0, 1, 1, 1, 1]


async def test_abort_arrives_after_what_was_sent() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0))
        await outlet.abort(InvalidRequestError("the engine refused", reason="BAD"))
        packets = aiter(inlet)
        assert (await anext(packets)).metadata["seq"] == 0
        with pytest.raises(InvalidRequestError, match="the engine refused"):
            await anext(packets)
        await inlet.aclose()
        await _settled(a)


async def test_consumer_that_stops_reading_stops_the_producer() -> None:
    async with two_hosts(window_bytes=1 << 20) as (a, b):
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0, 100_000))
        assert (await anext(aiter(inlet))).metadata["seq"] == 0
        await inlet.aclose()
        with pytest.raises(StagemeshError, match="stopped reading"):
            await _send(outlet, 100, 100_000)
        await _settled(a)


async def test_flow_that_nobody_expects_is_refused() -> None:
    async with two_hosts() as (a, b):
        outlet = a.plane.open_outlet(
            EdgeKey("nobody", "a->b", 1),
            endpoint=b.endpoint,
            consumer="b-0",
            connector=AUTO,
            policy=StepPolicy(),
        )
        with pytest.raises(StagemeshError, match="expects nothing"):
            await _send_all(outlet, [packet(0)])


async def test_stale_attempt_is_refused() -> None:
    async with two_hosts() as (a, b):
        b.plane.open_inlet(EdgeKey("r", "a->b", 2), producer="a-0")
        outlet = a.plane.open_outlet(
            EdgeKey("r", "a->b", 1),
            endpoint=b.endpoint,
            consumer="b-0",
            connector=AUTO,
            policy=StepPolicy(),
        )
        with pytest.raises(NotReadyError, match="replaced") as caught:
            await _send_all(outlet, [packet(0)])
        assert caught.value.reason == "STALE_ATTEMPT"


async def test_consumer_that_never_was_there_fails_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.link.GIVE_UP_S", 0.2)
    async with two_hosts() as (a, b):
        outlet, _ = open_flow(a, b)
        await b.server.stop(None)
        with pytest.raises(UnavailableError, match="b-0"):
            await _send(outlet, 1, 10)


async def test_lost_producer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.inflow.LOST_PRODUCER_S", 0.2)
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0))
        packets = aiter(inlet)
        await anext(packets)
        await a.plane.close()
        with pytest.raises(UnavailableError, match=r"a-0 .* chunk 1 of edge a->b"):
            await anext(packets)


@BOTH
async def test_eight_requests_share_a_link(connector: ConnectorName) -> None:
    async with two_hosts(arena_bytes=4 << 20, window_bytes=1 << 20) as (a, b):
        flows = [open_flow(a, b, request=f"r{n}", connector=connector) for n in range(8)]
        async with asyncio.TaskGroup() as group:
            counts = [group.create_task(_count(inlet)) for _, inlet in flows]
            for outlet, _ in flows:
                group.create_task(_send(outlet, 10, 100_000))
        assert [count.result() for count in counts] == [10] * 8
        await _settled(a)
