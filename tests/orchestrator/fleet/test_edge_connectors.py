"""Edges are probed once both replicas are ready. A fixed connector that cannot work is detected before any request."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from stagemesh.common.errors import NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connector_agreement import EdgeProbe
from stagemesh.orchestrator.fleet.edge_connectors import PARTNERS, EdgeConnectors
from stagemesh.orchestrator.fleet.membership import Member
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.pipeline import Edge
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, Mesh, mesh, poll, texts, until_health

FIXED = CHAIN.replace("{from: a, to: b}", "{from: a, to: b, connector: nixl}")
BROKEN = NotReadyError(
    "connector nixl cannot be used with replica b-0: it is not installed; fix that, or set `connector: auto`",
    reason="CONNECTOR_UNAVAILABLE",
)
_EDGE = Edge(name="a->b", producer="a", consumer="b", connector="nixl")
_SHM_EDGE = Edge(name="a->b", producer="a", consumer="b", connector="shm")
GONE = UnavailableError("b-0 is out of reach")


async def _link(chain: Mesh) -> orchestrator_pb2.EdgeLink:
    return (await chain.describe()).edges[0].links[0]


async def _until_rejected(chain: Mesh) -> orchestrator_pb2.EdgeLink:
    described = await poll(
        chain.describe, until=lambda seen: any(link.HasField("error") for link in seen.edges[0].links), timeout_s=10
    )
    return described.edges[0].links[0]


class _Answering:
    """A replica client that answers probes: an error for the consumers in `broken`, else that nixl works."""

    def __init__(self, *broken: str, error: StagemeshError = BROKEN) -> None:
        self.broken, self.error = set(broken), error
        self.gate = asyncio.Event()
        self.gate.set()

    async def probe_edge(self, edge: str, consumer: ConsumerAddress, *_: object, **__: object) -> EdgeProbe:
        await self.gate.wait()
        if consumer.replica in self.broken:
            raise self.error
        return EdgeProbe("nixl", {})


def _replica(name: str, client: _Answering | None = None, *, host: str = "") -> Replica:
    member = Member(name[0], f"h:{name}", name)
    replica = Replica(member, cast("ReplicaClient", client or _Answering()), on_change=lambda: None)
    replica.host = host
    replica.observe(ReplicaState.READY, "")
    return replica


@asynccontextmanager
async def _probing(*replicas: Replica, edge: Edge = _EDGE) -> AsyncGenerator[tuple[EdgeConnectors, Notifier]]:
    """Runs the task that probes the links of an edge between replicas. The notifier fires when a link was probed."""
    links, changed = EdgeConnectors((edge,)), Notifier()
    for replica in replicas:
        links.join(replica)
    task = asyncio.create_task(links.probe_links(on_change=changed.fire))
    try:
        async with asyncio.timeout(5):
            yield links, changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(changed: Notifier, condition: Callable[[], bool]) -> None:
    while not condition():
        await changed.wait()


async def test_each_edge_is_described_with_what_it_uses(chain: Mesh) -> None:
    edges = (await chain.describe()).edges
    links = [(link.producer, link.consumer, link.connector) for edge in edges for link in edge.links]
    assert links == [("a-0", "b-0", chunk_pb2.CONNECTOR_SHM), ("b-0", "c-0", chunk_pb2.CONNECTOR_SHM)]


async def test_refused_connectors_are_described_with_the_reason(tmp_path: Path) -> None:
    refusal = stage_pb2.ConnectorRefusal(connector=chunk_pb2.CONNECTOR_SHM, error=error_to_wire(BROKEN))
    found = stage_pb2.ProbeEdgeResponse(connector=chunk_pb2.CONNECTOR_GRPC, refusals=[refusal])
    async with mesh(tmp_path, probed={"a": [found]}) as chain:
        link = await _link(chain)
    assert link.connector == chunk_pb2.CONNECTOR_GRPC
    (refused,) = link.refusals
    assert (refused.connector, refused.error.message) == (chunk_pb2.CONNECTOR_SHM, BROKEN.message)


async def test_the_probe_names_edge_consumer_and_connector(tmp_path: Path) -> None:
    async with mesh(tmp_path, FIXED) as chain:
        probe = chain.stages["a"].probes[0]
        endpoint = (await chain.describe()).stages[1].replicas[0].endpoint
    assert (probe.edge, probe.consumer, probe.endpoint) == ("a->b", "b-0", endpoint)
    assert probe.connector == chunk_pb2.CONNECTOR_NIXL


async def test_fixed_connector_that_cannot_work_keeps_the_pipeline_from_serving(tmp_path: Path) -> None:
    async with mesh(tmp_path, FIXED, ready=False, probed={"a": [BROKEN]}) as chain:
        link = await _until_rejected(chain)
        error = await chain.failure()
        await until_health(chain.channel, serving=False)
        # This request does not need the edge.
        assert texts(await chain.generate(outputs=["first"]), "first") == "a done"
    assert (link.error.reason, link.connector) == ("CONNECTOR_UNAVAILABLE", 0)
    assert isinstance(error, NotReadyError)
    assert error.message == f"edge a->b from a-0 to b-0: {BROKEN.message}"
    assert (error.reason, error.metadata["edge"]) == ("CONNECTOR_UNAVAILABLE", "a->b")


@pytest.mark.parametrize("first", [BROKEN, GONE], ids=["it did not work", "the consumer was unreachable"])
async def test_fixed_connector_that_works_later_is_found(tmp_path: Path, first: StagemeshError) -> None:
    works = stage_pb2.ProbeEdgeResponse(connector=chunk_pb2.CONNECTOR_NIXL)
    async with mesh(tmp_path, FIXED, probed={"a": [first, works]}) as chain:
        assert len(chain.stages["a"].probes) == 2
        assert (await _link(chain)).connector == chunk_pb2.CONNECTOR_NIXL
        assert texts(await chain.generate(), "last") == "c done"


async def test_auto_serves_even_if_the_probe_failed(tmp_path: Path) -> None:
    async with mesh(tmp_path, probed={"a": [BROKEN], "b": [GONE]}) as chain:
        assert texts(await chain.generate(), "last") == "c done"
        described = (await chain.describe()).edges
    assert [edge.links[0].error.message for edge in described] == [
        f"edge a->b from a-0 to b-0: {BROKEN.message}",
        f"edge b->c from b-0 to c-0: {GONE.message}",
    ]


async def test_replica_that_was_unreachable_is_probed_again(chain: Mesh) -> None:
    chain.stages["b"].description.state = stage_pb2.REPLICA_STATE_LOADING
    chain.stages["b"].description.detail = "reading weights"
    chain.servers["b"].set_health("", serving=False)
    await until_health(chain.channel, serving=False)
    described = await chain.describe()
    (replica,) = described.stages[1].replicas
    assert (replica.name, replica.state) == ("b-0", stage_pb2.REPLICA_STATE_LOADING)
    assert (replica.detail, list(described.edges[0].links)) == ("reading weights", [])
    chain.stages["b"].description.state = stage_pb2.REPLICA_STATE_READY
    chain.servers["b"].set_health("", serving=True)
    await until_health(chain.channel, serving=True)
    assert [len(chain.stages[name].probes) for name in "ab"] == [2, 2]


async def test_a_replica_that_joins_does_not_stop_the_others() -> None:
    async with _probing(_replica("a-0"), _replica("b-0")) as (links, changed):
        assert not links.are_ready([_EDGE])
        await changed.wait()
        assert links.are_ready([_EDGE])
        links.join(_replica("b-1"))
        assert links.are_ready([_EDGE])
        links.join(broken := _replica("a-1", _Answering("b-0", "b-1")))
        await changed.wait()
        assert links.are_ready([_EDGE])
        assert broken.state is ReplicaState.FAILED


async def test_a_replica_that_left_has_no_links() -> None:
    replicas = [_replica(name) for name in ("a-0", "a-1", "b-0", "b-1")]
    async with _probing(*replicas) as (links, changed):
        await changed.wait()
        for replica in replicas:
            links.leave(replica)
            links.leave(replica)
    assert not links.links_of(_EDGE)
    assert not links.are_ready([_EDGE])
    assert all(not held for held in (links._by_replica, links._pools, links._usable[_EDGE.name]))


async def test_closing_the_client_fails_a_probe_that_runs() -> None:
    # Connections to this port are never accepted.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        client = ReplicaClient(stage="a", replica="a-0", endpoint=endpoint)
        asking = asyncio.create_task(client.probe_edge("a->b", ConsumerAddress("b-0", "h:1"), "auto", timeout_s=20))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(UnavailableError, match="a-0"):
            await asking


async def test_links_grow_with_the_replicas_and_not_with_their_pairs() -> None:
    before = len(asyncio.all_tasks())
    replicas = [_replica(f"{stage}-{number}") for number in range(100) for stage in "ab"]
    async with _probing(*replicas) as (links, _):
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) - before < 20
    assert 100 <= len(links.links_of(_EDGE)) <= 200 * PARTNERS


async def test_a_replica_whose_partners_all_left_gets_others() -> None:
    links = EdgeConnectors((_EDGE,), partners=1)
    one, *others = (_replica(name) for name in ("a-0", "b-0", "b-1"))
    for replica in (*others, one):
        links.join(replica)
    links.leave(links.links_of(_EDGE)[0].consumer)
    assert [link.producer for link in links.links_of(_EDGE)] == [one]


async def test_a_joining_replica_gets_requests_once_its_fixed_connector_is_known_to_work() -> None:
    producer, late = _Answering(), _replica("b-1")
    async with _probing(_replica("a-0", producer), _replica("b-0")) as (links, changed):
        await changed.wait()
        producer.gate.clear()
        links.join(late)
        await asyncio.sleep(0)
        assert (late.state, links.are_ready([_EDGE])) == (ReplicaState.LOADING, True)
        producer.gate.set()
        await changed.wait()
        assert late.state is ReplicaState.READY


async def test_a_fixed_shm_edge_links_only_replicas_of_one_host() -> None:
    pods = [[_replica(f"{stage}-{number}", host=f"pod-{number}") for stage in "ab"] for number in range(2)]
    async with _probing(*pods[0], *pods[1], edge=_SHM_EDGE) as (links, changed):
        await _until(changed, lambda: all(link.is_answered for link in links.links_of(_SHM_EDGE)))
        assert [[link.producer, link.consumer] for link in links.links_of(_SHM_EDGE)] == pods
        assert {replica.state for pod in pods for replica in pod} == {ReplicaState.READY}


async def test_a_replica_whose_shm_partner_left_gets_no_requests_until_another_is_on_its_host() -> None:
    here, left, there, stays = (_replica(name, host=name[-1]) for name in ("a-0", "b-0", "a-1", "b-1"))
    async with _probing(here, left, there, stays, edge=_SHM_EDGE) as (links, changed):
        await _until(changed, lambda: all(link.is_answered for link in links.links_of(_SHM_EDGE)))
        links.leave(left)
        assert (here.state, there.state) == (ReplicaState.LOADING, ReplicaState.READY)
        assert here.detail == "edge a->b uses shm, and no replica of stage 'b' is ready on its host"
        assert links.are_ready([_SHM_EDGE])
        links.join(_replica("b-2", host="0"))
        await _until(changed, lambda: here.state is ReplicaState.READY)


async def test_the_working_replica_serves_even_if_the_broken_one_came_first() -> None:
    broken, working = _replica("a-0", _Answering("b-0")), _replica("a-1")
    async with _probing(broken, _replica("b-0")) as (links, changed):
        await changed.wait()
        assert not links.are_ready([_EDGE])
        with pytest.raises(NotReadyError, match="cannot be used"):
            links.check([_EDGE])
        links.join(working)
        await changed.wait()
        assert links.are_ready([_EDGE])
        assert (broken.state, working.state) == (ReplicaState.FAILED, ReplicaState.READY)


async def test_a_broken_replica_blames_no_replica_that_joins_later() -> None:
    broken, late = _replica("a-1", _Answering("b-0", "b-1")), _replica("b-1")
    async with _probing(_replica("a-0"), _replica("b-0")) as (links, changed):
        await _until(changed, lambda: links.are_ready([_EDGE]))
        links.join(broken)
        await _until(changed, lambda: broken.state is ReplicaState.FAILED)
        links.join(late)
        await _until(changed, lambda: all(link.is_answered for link in links.links_of(_EDGE)))
        assert (broken.state, late.state) == (ReplicaState.FAILED, ReplicaState.READY)
        assert links.are_ready([_EDGE])


async def test_the_pipeline_stops_serving_if_only_a_broken_replica_remains() -> None:
    good, broken = _replica("b-0"), _replica("b-1")
    async with _probing(_replica("a-0", _Answering("b-1")), good, broken) as (links, changed):
        await _until(changed, lambda: broken.state is ReplicaState.FAILED)
        links.leave(good)
        assert not links.are_ready([_EDGE])
        with pytest.raises(NotReadyError, match="from a-0 to b-1"):
            links.check([_EDGE])
