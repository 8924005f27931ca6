"""A producer that is killed and restarted at the same address: no data of its earlier incarnation is accepted (D6)."""

import asyncio

import pytest

from tests.connectors.connector_names import CONNECTORS
from tests.connectors.replicas import Replica, ReplicaError, flow, replica

LIMITS = {"arena_bytes": 4 << 20, "window_bytes": 1 << 20}
"""Size of the arena, which the successor fills several times."""
CHUNK_BYTES = 100_000
READ = 3
"""Number of chunks that the engine reads before its producer dies; more have arrived by then."""


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_data_of_an_earlier_incarnation_is_never_accepted(connector: str) -> None:
    async with replica("b-0", limits=LIMITS) as consumer:
        async with replica("a-0", limits=LIMITS) as former:
            address = former.endpoint
            tasks = await flow(
                former, consumer, request="old", connector=connector, count=1000, size_bytes=CHUNK_BYTES, gated=True
            )
            await consumer.call("allow", request="old", packets=READ)
            await consumer.wait("progress", lambda count: count == READ, request="old")
            await former.wait("progress", lambda count: count > 2 * READ, request="old")
            former.kill()
            with pytest.raises(ConnectionError):
                await tasks[0]
        async with replica("a-0", address=address, limits=LIMITS) as successor:
            assert successor.endpoint == address
            await _new_data_arrives(successor, consumer, connector)
            await _old_flow_is_rejected(successor, consumer, connector)
            await consumer.call("allow", request="old")
            with pytest.raises(ReplicaError) as caught:
                await tasks[1]
            # `receive` checks that the chunks which arrived equal the sent ones. Then the reader gets the error.
            assert caught.value.reason == "PEER_LOST"
            assert await consumer.call("progress", request="old") > READ


async def _new_data_arrives(successor: Replica, consumer: Replica, connector: str) -> None:
    tasks = await flow(successor, consumer, request="new", connector=connector, count=200, size_bytes=CHUNK_BYTES)
    sent, received = await asyncio.gather(*tasks)
    assert (sent["chunks"], sent["connector"], received["count"]) == (200, connector, 200)


async def _old_flow_is_rejected(successor: Replica, consumer: Replica, connector: str) -> None:
    """Checks that a producer which sends the same flow again is rejected, with all of its chunks."""
    with pytest.raises(ReplicaError) as caught:
        await successor.call(
            "send",
            request="old",
            endpoint=consumer.endpoint,
            consumer=consumer.name,
            connector=connector,
            count=5,
            size_bytes=CHUNK_BYTES,
        )
    assert caught.value.reason == "STALE_INCARNATION"
