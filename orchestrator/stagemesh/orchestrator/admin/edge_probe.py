"""Asks anew what an edge uses."""

import asyncio

from stagemesh.common.errors import NotFoundError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.fleet.edge_connectors import EdgeLink
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.spec import Edge

_AT_ONCE = 64
"""Probes under way: the pairs of a large pipeline are many."""


async def probe_edge(directory: Directory, edge: Edge, *, producer: str = "", consumer: str = "") -> list[EdgeLink]:
    """The edge's links between the replicas that are named, or all; each holds what its producer answered, or the
    error. Raises NotFoundError (UNKNOWN_TARGET) for a replica that is not there.
    """
    links = [
        EdgeLink(edge, producer=each, consumer=other)
        for each in _ends(directory, edge.producer, producer)
        for other in _ends(directory, edge.consumer, consumer)
    ]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(link: EdgeLink) -> None:
        async with gate:
            await link.ask()

    await asyncio.gather(*map(ask, links))
    return links


def _ends(directory: Directory, stage: str, name: str) -> list[Replica]:
    replicas = directory.stage_replicas(stage)
    found = [replica for replica in replicas if name in ("", replica.name)]
    if name and not found:
        raise NotFoundError(
            f"stage {stage!r} has no replica {name!r}; it has {', '.join(each.name for each in replicas) or 'none'}",
            reason="UNKNOWN_TARGET",
            metadata={"target": name, "stage": stage},
        )
    return found
