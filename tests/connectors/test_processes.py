"""Replicas as processes: one is killed or restarted, or reads slowly; its peers lose no data and no memory."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.connectors import EACH_CONNECTOR
from tests.connectors.replicas import Replica, ReplicaError, flow, replica

NOTICED_S = 5.0
"""Limit for a peer to notice, far below the lifetime of a lease; it mostly takes milliseconds."""
FLAT_BYTES = 32 << 20
"""Bytes that an allocator may keep of the largest messages."""
ENDLESS = 1_000_000
LIMITS = {"arena_bytes": 16 << 20, "window_bytes": 4 << 20}
WARM_UP_ROUNDS = 2


def _shared_memory() -> set[str]:
    """Returns the files that this project, or UCX on its behalf, has created in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("stagemesh-arena", "ucx"))}


@asynccontextmanager
async def _victim(survivor: Replica, *, number: int, connector: str, draw: random.Random) -> AsyncIterator[Replica]:
    """Yields a replica amid an endless flow to or from the survivor. The survivor's end fails when the replica dies."""
    request, producing, size_bytes = f"killed-{number}", number % 2 == 0, draw.choice([500, 64 << 10, 1 << 20])
    # At least one: nothing here would report a producer that died before it reached the survivor.
    least, pause_s = 1 + draw.randrange(50), draw.uniform(0, 0.005)
    async with replica("v-0", limits=LIMITS) as victim:
        producer, consumer = (victim, survivor) if producing else (survivor, victim)
        tasks = await flow(
            producer, consumer, request=request, connector=connector, count=ENDLESS, size_bytes=size_bytes
        )
        await survivor.wait("progress", lambda count: count >= least, request=request)
        # Kills at a random moment.
        await asyncio.sleep(pause_s)
        killed_at = time.monotonic()
        yield victim
        async with asyncio.timeout(10):
            for task in tasks:
                with pytest.raises((ReplicaError, ConnectionError)):
                    await task
        await survivor.call("forget", request=request)
        assert time.monotonic() - killed_at < NOTICED_S, f"{request}: noticed after {time.monotonic() - killed_at} s"
        left_s = NOTICED_S - (time.monotonic() - killed_at)
        await survivor.wait("stats", lambda stats: stats["arena_used_bytes"] == 0, timeout_s=left_s)


async def _round(survivor: Replica, other: Replica, *, number: int, connector: str, draw: random.Random) -> None:
    """Kills a replica while the survivor has a flow with another replica, which must continue undisturbed."""
    async with _victim(survivor, number=number, connector=connector, draw=draw) as victim:
        other_flow = await flow(
            survivor, other, request=f"other_flow-{number}", connector=connector, count=20, size_bytes=100_000
        )
        victim.kill()
    sent, received = await asyncio.gather(*other_flow)
    assert (sent["chunks"], received["count"]) == (20, 20)
    await survivor.call("forget", request=f"other_flow-{number}")
    await other.call("forget", request=f"other_flow-{number}")
    await survivor.wait("stats", lambda stats: stats["arena_used_bytes"] == 0)


def _is_flat(before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    return (
        after["descriptors"] <= before["descriptors"] + 1
        and after["tasks"] <= before["tasks"] + 1
        and after["private_bytes"] <= before["private_bytes"] + FLAT_BYTES
    )


async def _kill_rounds(connector: str, rounds: int) -> None:
    shared_before = _shared_memory()
    draw = random.Random(f"{connector} {rounds}")
    async with replica("s-0", limits=LIMITS) as survivor, replica("t-0", limits=LIMITS) as other:
        for number in range(WARM_UP_ROUNDS):
            await _round(survivor, other, number=number, connector=connector, draw=draw)
        # Creates what the survivor creates once and retains. A victim may die before the survivor has created it.
        warm = await flow(other, survivor, request="warm", connector=connector, count=5, size_bytes=1 << 20)
        await asyncio.gather(*warm)
        for each in (survivor, other):
            await each.call("forget", request="warm")
        before = await survivor.call("stats")
        for number in range(WARM_UP_ROUNDS, rounds):
            await _round(survivor, other, number=number, connector=connector, draw=draw)
        await survivor.wait("stats", lambda after: _is_flat(before, after))
    assert _shared_memory() <= shared_before


@EACH_CONNECTOR
async def test_the_survivor_notices_a_kill_at_once(connector: str) -> None:
    await _kill_rounds(connector, WARM_UP_ROUNDS + 1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@EACH_CONNECTOR
async def test_two_hundred_kills_leave_nothing(connector: str) -> None:
    await _kill_rounds(connector, 70)


CHUNK_BYTES = 1 << 20
CREDIT_BYTES = 64 << 20
GROWTH_BYTES = 16 << 20
SLOW_LIMITS = {"arena_bytes": 256 << 20, "window_bytes": CREDIT_BYTES}
FAST = 200


async def _fast(producer: Replica, consumer: Replica, *, request: str, connector: str) -> float:
    """Returns the rate of a request that is read without pauses, in packets per second."""
    tasks = await flow(producer, consumer, request=request, connector=connector, count=FAST, size_bytes=64 << 10)
    sent, received = await asyncio.gather(*tasks)
    assert received["count"] == sent["chunks"] == FAST
    return float(FAST / sent["seconds"])


async def _slow_with_fast(connector: str, chunks: int) -> float:
    """Delivers all chunks of a slow request; returns the rate of a concurrent fast one relative to its rate alone."""
    async with replica("a-0", limits=SLOW_LIMITS) as producer, replica("b-0", limits=SLOW_LIMITS) as consumer:
        alone = max([await _fast(producer, consumer, request=f"alone-{n}", connector=connector) for n in range(3)])
        before = await producer.call("stats")
        sender, receiver = await flow(
            producer, consumer, request="slow", connector=connector, count=chunks, size_bytes=CHUNK_BYTES, gated=True
        )
        await producer.wait("progress", lambda sent: sent >= 60, request="slow")
        beside = [await _fast(producer, consumer, request=f"beside-{n}", connector=connector) for n in range(3)]
        assert not sender.done()
        assert await producer.call("progress", request="slow") <= CREDIT_BYTES // CHUNK_BYTES
        held = await producer.call("stats")
        await consumer.call("allow", request="slow")
        sent, received = await asyncio.gather(sender, receiver)
        assert received["count"] == sent["chunks"] == chunks
        after = await producer.call("stats")
        assert max(held["private_bytes"], after["private_bytes"]) - before["private_bytes"] < GROWTH_BYTES
        return max(beside) / alone


@EACH_CONNECTOR
async def test_slow_consumer_costs_its_producer_no_memory(connector: str) -> None:
    assert await _slow_with_fast(connector, 600) > 0


@pytest.mark.soak
@pytest.mark.timeout(600)
@EACH_CONNECTOR
async def test_slow_request_does_not_slow_a_fast_one(connector: str) -> None:
    assert await _slow_with_fast(connector, 10_000) >= 0.8
