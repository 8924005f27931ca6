from pathlib import Path

import pytest

from stagemesh.connectors.errors import UnavailableError
from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.planner import Planner
from stagemesh.orchestrator.replica import Replica, ReplicaState
from stagemesh.orchestrator.spec import Pipeline, load_pipeline
from stagemesh.orchestrator.stages import GrpcStageClient
from stagemesh.v1 import stage_pb2
from tests.orchestrator.mesh import CHAIN, mesh, until_health
from tests.serving.health_calls import Request, Response, check


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return load_pipeline(str(tmp_path / "chain.yaml"))


class _IdleClient(GrpcStageClient):
    def __init__(self) -> None:
        pass


def _replicas(pipeline: Pipeline, count: int) -> dict[str, tuple[Replica, ...]]:
    changes: list[None] = []
    made = {
        stage: tuple(
            Replica(
                stage,
                ReplicaAddress(f"{stage}-{i}", f"h:{i}"),
                _IdleClient(),
                on_change=lambda: changes.append(None),
            )
            for i in range(count)
        )
        for stage in pipeline.stages
    }
    for replica in (replica for group in made.values() for replica in group):
        replica.observe(ReplicaState.READY, "")
    return made


def test_requests_spread_over_the_replicas(pipeline: Pipeline) -> None:
    planner = Planner(pipeline, _replicas(pipeline, 2))
    chosen = [planner.plan(pipeline.route(["last"])).replicas["b"] for _ in range(4)]
    assert chosen == ["b-0", "b-1", "b-0", "b-1"]


def test_a_released_plan_makes_its_replica_the_first_choice_again(pipeline: Pipeline) -> None:
    planner = Planner(pipeline, _replicas(pipeline, 2))
    planner.plan(pipeline.route(["last"])).release()
    assert planner.plan(pipeline.route(["last"])).replicas["b"] == "b-0"


def test_only_ready_replicas_are_chosen(pipeline: Pipeline) -> None:
    replicas = _replicas(pipeline, 2)
    replicas["b"][0].observe(ReplicaState.DRAINING, "")
    assert Planner(pipeline, replicas).plan(pipeline.route(["last"])).replicas["b"] == "b-1"


def test_a_stage_without_a_ready_replica_is_named_with_their_states(pipeline: Pipeline) -> None:
    replicas = _replicas(pipeline, 2)
    replicas["b"][0].observe(ReplicaState.LOADING, "reading weights")
    replicas["b"][1].observe(ReplicaState.UNREACHABLE, "")
    with pytest.raises(UnavailableError, match=r"stage 'b' is ready: b-0 loading \(reading weights\), b-1 unreachable"):
        Planner(pipeline, replicas).plan(pipeline.route(["last"]))
    assert replicas["a"][0].running == 0


async def test_a_stage_that_is_not_needed_need_not_be_ready(pipeline: Pipeline) -> None:
    replicas = _replicas(pipeline, 1)
    replicas["c"][0].observe(ReplicaState.FAILED, "")
    assert set(Planner(pipeline, replicas).plan(pipeline.route(["first"])).replicas) == {"a"}


@pytest.mark.parametrize(
    ("field", "value"), [("generation", "other"), ("pipeline", "other"), ("wire_version", 2), ("stage", "other")]
)
def test_a_replica_that_belongs_elsewhere_is_refused(pipeline: Pipeline, field: str, value: str | int) -> None:
    said = stage_pb2.DescribeResponse(
        pipeline="chain",
        generation=pipeline.generation,
        stage="a",
        wire_version=1,
        state=stage_pb2.REPLICA_STATE_READY,
    )
    setattr(said, field, value)
    replica = _replicas(pipeline, 1)["a"][0]
    replica.observe_description(said, pipeline)
    assert replica.state is ReplicaState.FAILED
    assert replica.detail.startswith(f"refused: its {field.replace('_', ' ')} is {value}, expected")


async def test_the_orchestrator_serves_once_every_stage_does(tmp_path: Path) -> None:
    async with mesh(tmp_path, ready=False) as chain:
        live = await check(chain.channel)(Request(service="liveness"))
        await until_health(chain.channel, serving=True)
        whole = await check(chain.channel)(Request(service="stagemesh.v1.OrchestratorService"))
    assert (live.status, whole.status) == (Response.SERVING, Response.SERVING)


async def test_a_replica_that_stops_serving_is_seen_to_load(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        chain.stages["b"].description.state = stage_pb2.REPLICA_STATE_LOADING
        chain.stages["b"].description.detail = "reading weights"
        chain.servers["b"].set_health("", serving=False)
        await until_health(chain.channel, serving=False)
        replica = (await chain.describe()).stages[1].replicas[0]
    assert (replica.name, replica.state, replica.detail) == (
        "b-0",
        stage_pb2.REPLICA_STATE_LOADING,
        "reading weights",
    )


async def test_the_pipeline_is_described_as_it_is_now(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        described = await chain.describe()
    assert [stage.name for stage in described.stages] == ["a", "b", "c"]
    assert [(edge.name, edge.from_stage, edge.to_stage) for edge in described.edges] == [
        ("a->b", "a", "b"),
        ("b->c", "b", "c"),
    ]
    assert {output.name: output.kind for output in described.outputs} == {"first": "text", "last": "text"}
