"""A consumer that does not keep up: its producer waits, its memory stays flat, and no other flow is delayed."""

import asyncio

import pytest

from tests.connectors.connector_names import CONNECTORS
from tests.connectors.replicas import Replica, flow, replica

CHUNK_BYTES = 1 << 20
CREDIT_BYTES = 64 << 20
GROWTH_BYTES = 16 << 20
LIMITS = {"arena_bytes": 256 << 20, "window_bytes": CREDIT_BYTES}
FAST = 200
ALL = pytest.mark.parametrize("connector", CONNECTORS)


async def _fast(producer: Replica, consumer: Replica, *, request: str, connector: str) -> float:
    """Returns the rate of a request that is read without pauses, in packets per second."""
    tasks = await flow(producer, consumer, request=request, connector=connector, count=FAST, size_bytes=64 << 10)
    sent, received = await asyncio.gather(*tasks)
    assert received["count"] == sent["chunks"] == FAST
    return float(FAST / sent["seconds"])


async def _slow_with_fast(connector: str, chunks: int) -> float:
    """Delivers all chunks of a slow request; returns the rate of a concurrent fast one relative to its rate alone."""
    async with replica("a-0", limits=LIMITS) as producer, replica("b-0", limits=LIMITS) as consumer:
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


@ALL
async def test_slow_consumer_costs_its_producer_no_memory(connector: str) -> None:
    assert await _slow_with_fast(connector, 600) > 0


@pytest.mark.soak
@pytest.mark.timeout(600)
@ALL
async def test_slow_request_does_not_slow_a_fast_one(connector: str) -> None:
    assert await _slow_with_fast(connector, 10_000) >= 0.8
