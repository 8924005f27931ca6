"""Edges whose ends are replaced, over real data planes: packets stay complete and in order, and memory is released."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import AUTO, GRPC, SHM
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.conformance import Host, assert_same, exchange, open_outlet, packet, receive_all, send_all
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.connectors.peer_timeouts import REBIND_S
from tests.rpc.call_errors import raises

_BOUND_S = 20


@asynccontextmanager
async def hosts(count: int, **limits: int) -> AsyncGenerator[list[Host]]:
    """Yields `count` replicas."""
    started = [await Host.started(f"r-{number}", **limits) for number in range(count)]
    try:
        yield started
    finally:
        for host in started:
            await host.close()


def key_of(attempt: int) -> EdgeKey:
    return EdgeKey("r", "a->b", attempt)


out = partial(open_outlet, rebind_s=REBIND_S)


def rebind_out(outlet: Outlet, producer: Host, consumer: Host, *, attempt: int, connector: str = AUTO) -> None:
    outlet.check_rebindable()
    producer.plane.rebind_outlet(
        outlet, key_of(attempt), consumer=ConsumerAddress(consumer.replica, consumer.endpoint), connector=connector
    )


def into(consumer: Host, producer: Host, *, attempt: int, rebind_s: float = 0.0) -> Inlet:
    return consumer.plane.open_inlet(key_of(attempt), producer=producer.replica, rebind_s=rebind_s)


def rebind_into(inlet: Inlet, consumer: Host, producer: Host, *, attempt: int, first_rows: dict[str, int]) -> None:
    inlet.check_rebindable(first_rows)
    consumer.plane.rebind_inlet(inlet, key_of(attempt), producer=producer.replica, first_rows=first_rows)


def rows(count: int, *, start: int = 0) -> list[Packet]:
    """Returns packets of seven rows each, whose rows are numbered from `start` on."""
    return [Packet({"x": np.arange(at, at + 7, dtype=np.int64)}) for at in range(start, start + 7 * count, 7)]


@pytest.mark.parametrize("connector", [SHM, GRPC])
@pytest.mark.parametrize("size", [10, 30_000, 400_000], ids=["inline", "arena", "bulk"])
async def test_consumers_are_replaced_at_random(connector: str, size: int) -> None:
    draw, sent = random.Random(size), [packet(seq, size) for seq in range(12)]
    async with asyncio.timeout(_BOUND_S), hosts(6, arena_bytes=64 << 20, window_bytes=1 << 20) as (a, *consumers):
        inlet = into(consumers[0], a, attempt=1)
        outlet = out(a, consumers[0], attempt=1, connector=connector)
        sending = asyncio.create_task(send_all(outlet, sent))
        for attempt, consumer in enumerate(consumers[1:], start=2):
            for _ in range(draw.randrange(len(sent) // 2)):
                await anext(inlet)
            former, inlet = inlet, into(consumer, a, attempt=attempt)
            if draw.random() < 0.5:
                await former.aclose(lost=True)
            rebind_out(outlet, a, consumer, attempt=attempt, connector=connector)
        received = await receive_all(inlet)
        await sending
        assert_same(received, sent)
        assert outlet.usage.chunks == len(sent)
        del former
        for host in (a, consumers[-1]):
            await host.settled()


@pytest.mark.parametrize(
    "policy",
    [StepPolicy(), WholePolicy(), FramesPolicy(10, (3, 5)), FramesPolicy(10, left_context_frames=4)],
    ids=["step", "whole", "frames", "context"],
)
@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_restarted_producer_continues_the_edge_by_rows(policy: ChunkPolicy, taken: int) -> None:
    async with asyncio.timeout(_BOUND_S), hosts(3) as (a1, a2, b):
        expected = await _carried(a1, b, policy)
        inlet = into(b, a1, attempt=2, rebind_s=REBIND_S)
        former = out(a1, b, attempt=2, policy=policy)
        for one in rows(8):
            await former.send(one)
        got = [await anext(inlet) for _ in range(0 if isinstance(policy, WholePolicy) else taken)]
        rebind_into(inlet, b, a2, attempt=3, first_rows={})
        rest = await exchange(out(a2, b, attempt=3, policy=policy), inlet, rows(10))
        assert_same([*got, *rest], expected)
        former.abort(InternalError("it is gone"))


async def test_producer_that_resumes_from_a_checkpoint_may_cut_at_other_rows() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(3) as (a1, a2, b):
        inlet = into(b, a1, attempt=1, rebind_s=REBIND_S)
        former = out(a1, b, attempt=1)
        for one in rows(5):
            await former.send(one)
        got = [await anext(inlet) for _ in range(5)]
        rebind_into(inlet, b, a2, attempt=2, first_rows={"x": 14})
        again = out(a2, b, attempt=2, policy=FramesPolicy(5), first_rows={"x": 14})
        rest = await exchange(again, inlet, rows(8, start=14))
        numbers = np.concatenate([one.tensors["x"] for one in (*got, *rest)])
        assert numbers.tolist() == list(range(70))


async def test_both_ends_may_change() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(4) as (a1, a2, b1, b2):
        inlet = into(b1, a1, attempt=1, rebind_s=REBIND_S)
        former = out(a1, b1, attempt=1)
        await former.send(rows(1)[0])
        assert await anext(inlet)
        rebind_into(inlet, b1, a2, attempt=2, first_rows={})
        outlet = out(a2, b1, attempt=2)
        sending = asyncio.create_task(send_all(outlet, rows(6)))
        await anext(inlet)
        await inlet.aclose(lost=True)
        last = into(b2, a2, attempt=3, rebind_s=REBIND_S)
        rebind_out(outlet, a2, b2, attempt=3)
        received = await receive_all(last)
        await sending
        assert_same(received, rows(6))


async def test_consumer_that_stops_reading_ends_the_edge() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(2) as (a, b):
        inlet = into(b, a, attempt=1)
        outlet = out(a, b, attempt=1)
        await outlet.send(rows(1)[0])
        await anext(inlet)
        await inlet.aclose()
        with pytest.raises(StagemeshError, match="stopped reading"):
            await send_all(outlet, rows(2000))
        with raises(NotReadyError, reason="CHUNK_GONE"):
            outlet.check_rebindable()


async def test_lost_edge_that_is_aborted_retains_nothing() -> None:
    async with asyncio.timeout(_BOUND_S), hosts(2) as (a, b):
        inlet = into(b, a, attempt=1)
        outlet = out(a, b, attempt=1)
        await outlet.send(packet(0, 30_000))
        await anext(inlet)
        await inlet.aclose(lost=True)
        while not outlet.is_lost:
            await asyncio.sleep(0.001)
        assert a.plane.arena.used_bytes
        outlet.abort(InternalError("the request failed"))
        await a.settled()


async def _carried(a: Host, b: Host, policy: ChunkPolicy) -> list[Packet]:
    """Returns the packets that an edge delivers without faults."""
    inlet = into(b, a, attempt=1)
    return await exchange(out(a, b, attempt=1, policy=policy), inlet, rows(10))
