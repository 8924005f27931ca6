"""Three hosts: the choices of `auto`, links that break and return, and connectors that fail during a flow."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.connectors.namespaces import ENVIRONMENT, Namespaces, namespaces
from tests.connectors.replicas import Replica, ReplicaError, flow, replica

LIMITS = {"arena_bytes": 32 << 20, "window_bytes": 4 << 20}
PARTITION_S = 5.0
ACROSS = ["nixl", "grpc"] if importlib.util.find_spec("nixl_cu12") else ["grpc"]
"""The connectors between hosts, best first."""


@asynccontextmanager
async def _on_host(hosts: Namespaces, number: int, name: str) -> AsyncIterator[Replica]:
    async with replica(
        name, within=hosts.within(number), listen=f"{hosts.address(number)}:0", environment=ENVIRONMENT, limits=LIMITS
    ) as one:
        yield one


async def test_auto_is_shm_on_a_host_and_the_best_network_between_hosts_with_the_reason() -> None:
    with namespaces() as hosts:
        async with _on_host(hosts, 0, "a-0") as a, _on_host(hosts, 0, "b-0") as b, _on_host(hosts, 1, "c-0") as c:
            used = []
            for consumer in (b, c):
                tasks = await flow(a, consumer, request=consumer.name, connector="auto", count=20, size_bytes=1 << 20)
                sent, received = await asyncio.gather(*tasks)
                assert received["count"] == 20
                used.append(sent["connector"])
            assert used == ["shm", ACROSS[0]]
            with pytest.raises(ReplicaError, match="not on one host"):
                await a.call("probe", consumer=c.name, endpoint=c.endpoint, connector="shm")
            found = await a.call("probe", consumer=c.name, endpoint=c.endpoint, connector="auto")
            assert (found["connector"], "not on one host" in found["refusals"]["shm"]) == (ACROSS[0], True)


@pytest.mark.parametrize("connector", ["auto", *ACROSS])
async def test_delivery_completes_after_a_partition(connector: str) -> None:
    with namespaces() as hosts:
        async with _on_host(hosts, 0, "a-0") as a, _on_host(hosts, 1, "b-0") as b, _on_host(hosts, 2, "c-0") as c:
            tasks = await flow(a, b, request="r", connector=connector, count=60, size_bytes=1 << 20, gated=True)
            await b.call("allow", request="r", packets=10)
            await b.wait("progress", lambda count: count == 10, request="r")
            hosts.cut(1)
            await b.call("allow", request="r")
            # The test needs a partition of this length. A flow between the other hosts continues undisturbed.
            _, undisturbed = await asyncio.gather(asyncio.sleep(PARTITION_S), _untouched(a, c, connector))
            assert undisturbed == 20
            hosts.heal(1)
            async with asyncio.timeout(20):
                sent, received = await asyncio.gather(*tasks)
            assert (sent["chunks"], received["count"]) == (60, 60)
            await a.wait("stats", lambda stats: stats["arena_used_bytes"] == 0)


async def _untouched(a: Replica, c: Replica, connector: str) -> int:
    tasks = await flow(a, c, request="other", connector=connector, count=20, size_bytes=1 << 20)
    _, received = await asyncio.gather(*tasks)
    return int(received["count"])
