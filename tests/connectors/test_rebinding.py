"""Edges whose ends are replaced one after the other, over real data planes, and what that costs of order and memory."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from stagemesh.common.connector_descriptors import AUTO, GRPC, SHM
from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.connectors.conformance import assert_same, receive_all, send_all
from stagemesh.connectors.edge import ChunkPolicy, EdgeKey, FramesPolicy, Packet, StepPolicy, WholePolicy
from stagemesh.connectors.flow.inlet import RebindingInlet
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.flow.outlet import RebindingOutlet
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from tests.connectors.hosts import Host, packet

_BOUND_S = 20


@asynccontextmanager
async def hosts(count: int, **limits: int) -> AsyncGenerator[list[Host]]:
    """So many replicas."""
    started = [await Host.started(f"r-{number}", **limits) for number in range(count)]
    try:
        yield started
    finally:
        for host in started:
            await host.close()


def out(producer: Host, consumer: Host, *, attempt: int, connector: str = AUTO) -> OutletAttempt:
    return producer.plane.open_outlet(
        EdgeKey("r", "a->b", attempt),
        endpoint=consumer.endpoint,
        consumer=consumer.replica,
        connector=connector,
        policy=StepPolicy(),
    )


def into(consumer: Host, producer: Host, *, attempt: int) -> InletAttempt:
    return consumer.plane.open_inlet(EdgeKey("r", "a->b", attempt), producer=producer.replica)


def rows(count: int, *, start: int = 0) -> list[Packet]:
    """Packets of seven rows each, numbered on."""
    return [Packet({"x": np.arange(at, at + 7, dtype=np.int64)}) for at in range(start, start + 7 * count, 7)]


@pytest.mark.parametrize("connector", [SHM, GRPC])
@pytest.mark.parametrize("size", [10, 30_000, 400_000], ids=["inline", "arena", "bulk"])
async def test_consumers_come_and_go_at_random(connector: str, size: int) -> None:
    draw, sent = random.Random(size), [packet(seq, size) for seq in range(12)]
    async with asyncio.timeout(_BOUND_S), hosts(6, arena_bytes=64 << 20, window_bytes=1 << 20) as (a, *consumers):
        inlet = into(consumers[0], a, attempt=1)
        outlet = RebindingOutlet(out(a, consumers[0], attempt=1, connector=connector), policy=StepPolicy())
        sending = asyncio.create_task(send_all(outlet, sent))
        for attempt, consumer in enumerate(consumers[1:], start=2):
            for _ in range(draw.randrange(len(sent) // 2)):
                await anext(inlet)
            former, inlet = inlet, into(consumer, a, attempt=attempt)
            if draw.random() < 0.5:
                await former.aclose(lost=True)
            outlet.check()
            outlet.rebind(partial(out, a, consumer, attempt=attempt, connector=connector))
        received = await receive_all(inlet)
        await sending
        assert_same(received, sent)
        assert outlet.usage.chunks == len(sent)
        del former
        for host in (a, consumers[-1]):
            await host.settled()


@pytest.mark.parametrize(
    "policy",
    [StepPolicy(), WholePolicy(), FramesPolicy(10, initial_frames=3), FramesPolicy(10, left_context_frames=4)],
    ids=["step", "whole", "frames", "context"],
)
@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_producer_that_starts_anew_is_taken_from_where_the_edge_stood(policy: ChunkPolicy, taken: int) -> None:
    async with asyncio.timeout(_BOUND_S), hosts(3) as (a1, a2, b):
        expected = await _carried(a1, b, policy)
        inlet = RebindingInlet(into(b, a1, attempt=2))
        former = RebindingOutlet(out(a1, b, attempt=2), policy=policy)
        for one in rows(8):
            await former.send(one)
        count = 0 if isinstance(policy, WholePolicy) else taken
        got = [await anext(inlet) for _ in range(count)]
        inlet.check({})
        inlet.rebind(partial(into, b, a2, attempt=3), first_rows={})
        later = RebindingOutlet(out(a2, b, attempt=3), policy=policy)
        _, rest = await asyncio.gather(send_all(later, rows(10)), receive_all(inlet))
        assert_same([*got, *rest], expected)
        await former.abort(InternalError("it is gone"))


async def test_producer_that_goes_on_from_a_checkpoint_may_cut_elsewhere() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(3) as (a1, a2, b):
        inlet = RebindingInlet(into(b, a1, attempt=1))
        former = RebindingOutlet(out(a1, b, attempt=1), policy=StepPolicy())
        for one in rows(5):
            await former.send(one)
        got = [await anext(inlet) for _ in range(5)]
        inlet.check({"x": 14})
        inlet.rebind(partial(into, b, a2, attempt=2), first_rows={"x": 14})
        later = RebindingOutlet(out(a2, b, attempt=2), policy=FramesPolicy(5))
        _, rest = await asyncio.gather(send_all(later, rows(8, start=14)), receive_all(inlet))
        numbers = np.concatenate([one.tensors["x"] for one in (*got, *rest)])
        assert numbers.tolist() == list(range(70))


async def test_both_ends_may_change() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(4) as (a1, a2, b1, b2):
        inlet = RebindingInlet(into(b1, a1, attempt=1))
        former = RebindingOutlet(out(a1, b1, attempt=1), policy=StepPolicy())
        await former.send(rows(1)[0])
        assert await anext(inlet)
        inlet.rebind(partial(into, b1, a2, attempt=2), first_rows={})
        outlet = RebindingOutlet(out(a2, b1, attempt=2), policy=StepPolicy())
        sending = asyncio.create_task(send_all(outlet, rows(6)))
        await anext(inlet)
        await inlet.aclose(lost=True)
        last = RebindingInlet(into(b2, a2, attempt=3))
        outlet.rebind(partial(out, a2, b2, attempt=3))
        received = await receive_all(last)
        await sending
        assert_same(received, rows(6))


async def test_consumer_that_stops_reading_of_its_own_accord_ends_the_edge() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(2) as (a, b):
        inlet = into(b, a, attempt=1)
        outlet = RebindingOutlet(out(a, b, attempt=1), policy=StepPolicy())
        await outlet.send(rows(1)[0])
        await anext(inlet)
        await inlet.aclose()
        with pytest.raises(StagemeshError, match="stopped reading"):
            await send_all(outlet, rows(2000))
        with pytest.raises(NotReadyError) as caught:
            outlet.check()
        assert caught.value.reason == "CHUNK_GONE"


async def test_lost_edge_that_is_aborted_keeps_nothing() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(2) as (a, b):
        inlet = into(b, a, attempt=1)
        outlet = RebindingOutlet(out(a, b, attempt=1), policy=StepPolicy())
        await outlet.send(packet(0, 30_000))
        await anext(inlet)
        await inlet.aclose(lost=True)
        while not outlet.is_lost:
            await asyncio.sleep(0.001)
        assert a.plane.arena_used_bytes
        await outlet.abort(InternalError("the request failed"))
        await a.settled()


async def _carried(a: Host, b: Host, policy: ChunkPolicy) -> list[Packet]:
    """What an edge brings to which nothing happens."""
    inlet, outlet = into(b, a, attempt=1), RebindingOutlet(out(a, b, attempt=1), policy=policy)
    _, received = await asyncio.gather(send_all(outlet, rows(10)), receive_all(inlet))
    return received
