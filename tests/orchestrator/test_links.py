"""Edges are probed once both ends are ready; a fixed connector that cannot work keeps the pipeline from starting."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from stagemesh.common.errors import NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.notifier import Notifier
from stagemesh.connectors.stream.negotiation import EdgeProbe
from stagemesh.connectors.stream.wire import error_to_wire
from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.fleet.edge_connectors import PARTNERS, EdgeLinks
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_connection import GrpcConnection
from stagemesh.orchestrator.fleet.stage_client import StageClient
from stagemesh.orchestrator.spec import Edge
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, Mesh, mesh, texts, until_health
from tests.orchestrator.scripted_stage import Probed

FIXED = CHAIN.replace("{from: a, to: b}", "{from: a, to: b, connector: nixl}")
BROKEN = NotReadyError(
    "connector nixl cannot be used with replica b-0: it is not installed; fix that, or set `connector: auto`",
    reason="CONNECTOR_UNAVAILABLE",
)
_EDGE = Edge(name="a->b", producer="a", consumer="b", connector="nixl")
GONE = UnavailableError("b-0 is out of reach")


async def _link(chain: Mesh) -> orchestrator_pb2.EdgeLink:
    return (await chain.describe()).edges[0].links[0]


async def _until_refused(chain: Mesh) -> orchestrator_pb2.EdgeLink:
    async with asyncio.timeout(10):
        while True:
            links = (await chain.describe()).edges[0].links
            if links and links[0].HasField("error"):
                return links[0]
            await asyncio.sleep(0.01)


class _Answering:
    """A client that says of every edge that it works, or what it is told to."""

    def __init__(self, error: StagemeshError | None = None) -> None:
        self.error = error
        self.asked: list[str] = []

    async def probe_edge(self, edge: str, *, consumer: str, **_: object) -> EdgeProbe:
        self.asked.append(consumer)
        if self.error is not None:
            raise self.error
        return EdgeProbe("nixl", {})


def _replica(name: str, client: _Answering | None = None) -> Replica:
    address = ReplicaAddress(name, f"h:{name}")
    return Replica(name[0], address, cast("StageClient", client or _Answering()), on_change=lambda: None)


@asynccontextmanager
async def _kept(links: EdgeLinks) -> AsyncGenerator[Notifier]:
    """The links' own task; fires when one is known."""
    changed = Notifier()
    task = asyncio.create_task(links.keep(on_change=changed.fire))
    try:
        async with asyncio.timeout(5):
            yield changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_edge_is_described_with_what_it_uses(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        edges = (await chain.describe()).edges
    links = [(link.producer, link.consumer, link.connector) for edge in edges for link in edge.links]
    assert links == [("a-0", "b-0", chunk_pb2.CONNECTOR_SHM), ("b-0", "c-0", chunk_pb2.CONNECTOR_SHM)]


async def test_better_connectors_are_described_with_why_not(tmp_path: Path) -> None:
    refusal = stage_pb2.ConnectorRefusal(connector=chunk_pb2.CONNECTOR_SHM, error=error_to_wire(BROKEN))
    found = stage_pb2.ProbeEdgeResponse(connector=chunk_pb2.CONNECTOR_GRPC, refusals=[refusal])
    async with mesh(tmp_path, probed={"a": [found]}) as chain:
        link = await _link(chain)
    assert link.connector == chunk_pb2.CONNECTOR_GRPC
    assert [(each.connector, each.error.message) for each in link.refusals] == [
        (chunk_pb2.CONNECTOR_SHM, BROKEN.message)
    ]


async def test_the_probe_names_edge_consumer_and_choice(tmp_path: Path) -> None:
    async with mesh(tmp_path, FIXED) as chain:
        probe = chain.stages["a"].probes[0]
        endpoint = (await chain.describe()).stages[1].replicas[0].endpoint
    assert (probe.edge, probe.consumer, probe.endpoint, probe.connector) == (
        "a->b",
        "b-0",
        endpoint,
        chunk_pb2.CONNECTOR_NIXL,
    )


async def test_fixed_choice_that_cannot_work_keeps_it_from_serving(tmp_path: Path) -> None:
    async with mesh(tmp_path, FIXED, ready=False, probed={"a": [BROKEN]}) as chain:
        link = await _until_refused(chain)
        error = await chain.failure()
        await until_health(chain.channel, serving=False)
    assert (link.error.reason, link.connector) == ("CONNECTOR_UNAVAILABLE", 0)
    assert isinstance(error, NotReadyError)
    assert error.message == f"edge a->b from a-0 to b-0: {BROKEN.message}"
    assert (error.reason, error.metadata["edge"]) == ("CONNECTOR_UNAVAILABLE", "a->b")


async def test_requests_that_need_not_cross_it_run(tmp_path: Path) -> None:
    async with mesh(tmp_path, FIXED, ready=False, probed={"a": [BROKEN]}) as chain:
        await _until_refused(chain)
        assert texts(await chain.generate(outputs=["first"]), "first") == "a done"


async def test_fixed_choice_that_works_later_is_found(tmp_path: Path) -> None:
    works = stage_pb2.ProbeEdgeResponse(connector=chunk_pb2.CONNECTOR_NIXL)
    async with mesh(tmp_path, FIXED, probed={"a": [BROKEN, works]}) as chain:
        assert (await _link(chain)).connector == chunk_pb2.CONNECTOR_NIXL
        assert texts(await chain.generate(), "last") == "c done"


async def test_fixed_choice_waits_for_a_consumer_out_of_reach(tmp_path: Path) -> None:
    answers: list[Probed] = [GONE, stage_pb2.ProbeEdgeResponse()]
    async with mesh(tmp_path, FIXED, probed={"a": answers}) as chain:
        assert len(chain.stages["a"].probes) == 2


async def test_auto_serves_whatever_became_of_the_probe(tmp_path: Path) -> None:
    async with mesh(tmp_path, probed={"a": [BROKEN], "b": [GONE]}) as chain:
        assert texts(await chain.generate(), "last") == "c done"
        described = (await chain.describe()).edges
    assert [edge.links[0].error.message for edge in described] == [
        f"edge a->b from a-0 to b-0: {BROKEN.message}",
        f"edge b->c from b-0 to c-0: {GONE.message}",
    ]


async def test_replica_that_was_away_is_probed_again(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        chain.stages["b"].description.state = stage_pb2.REPLICA_STATE_LOADING
        chain.servers["b"].set_health("", serving=False)
        await until_health(chain.channel, serving=False)
        assert not (await chain.describe()).edges[0].links
        chain.stages["b"].description.state = stage_pb2.REPLICA_STATE_READY
        chain.servers["b"].set_health("", serving=True)
        await until_health(chain.channel, serving=True)
        assert [len(chain.stages[name].probes) for name in "ab"] == [2, 2]


async def test_a_replica_that_joins_holds_nothing_up() -> None:
    links = EdgeLinks((_EDGE,))
    async with _kept(links) as changed:
        for name in ("a-0", "b-0"):
            links.joined(_replica(name))
        assert not links.ready
        await changed.wait()
        assert links.ready
        links.joined(_replica("b-1"))
        assert links.ready
        links.joined(_replica("a-1", _Answering(BROKEN)))
        while links.ready:
            await changed.wait()


async def test_a_replica_that_left_is_forgotten() -> None:
    links = EdgeLinks((_EDGE,))
    replicas = [_replica(name) for name in ("a-0", "a-1", "b-0", "b-1")]
    async with _kept(links) as changed:
        for replica in replicas:
            links.joined(replica)
        await changed.wait()
        for replica in replicas:
            links.left(replica)
            links.left(replica)
    assert not links.of(_EDGE)
    assert not links.ready
    assert all(not held for held in (links._by_replica, links._ready, links._settled[_EDGE.name]))


async def test_a_replica_that_leaves_while_it_is_asked_ends_no_asking() -> None:
    # Whoever connects is never taken.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        connection = GrpcConnection("a", name="a-0", endpoint=endpoint)
        asking = asyncio.create_task(
            connection.client.probe_edge("a->b", consumer="b-0", endpoint="h:1", connector="auto", timeout_s=20)
        )
        await asyncio.sleep(0)
        await connection.close()
        with pytest.raises(UnavailableError, match="a-0"):
            await asking


async def test_links_grow_with_the_replicas_and_not_with_their_pairs() -> None:
    links = EdgeLinks((_EDGE,))
    before = len(asyncio.all_tasks())
    async with _kept(links):
        for number in range(100):
            links.joined(_replica(f"a-{number}"))
            links.joined(_replica(f"b-{number}"))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) - before < 20
    assert 100 <= len(links.of(_EDGE)) <= 200 * PARTNERS


async def test_a_replica_whose_partners_all_left_gets_others() -> None:
    links = EdgeLinks((_EDGE,), partners=1)
    one, *others = (_replica(name) for name in ("a-0", "b-0", "b-1"))
    for replica in (*others, one):
        links.joined(replica)
    links.left(links.of(_EDGE)[0].consumer)
    assert [link.producer for link in links.of(_EDGE)] == [one]
