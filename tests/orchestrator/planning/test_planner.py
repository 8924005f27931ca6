import re
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from stagemesh.common.errors import InvalidRequestError, NotFoundError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.plugins.descriptors import signature_to_wire
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.orchestrator.fleet.membership import Member
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.orchestrator.fleet.replica_registry import ReplicaRegistry
from stagemesh.orchestrator.fleet.stage_adapters import StageAdapters
from stagemesh.orchestrator.planning.planner import NotReadyYetError, Plan, Planner
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import signature_pb2, stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from stagemesh.v1.signature_pb2 import TENSOR_KIND_TEXT
from tests.orchestrator.mesh import CHAIN, Mesh, load, mesh, until_health
from tests.orchestrator.replicas import ready_description, ready_replica
from tests.rpc.call_errors import raises
from tests.rpc.health_calls import Request, Response, check


class _Fleet:
    """A number of replicas of each stage, and a planner of requests for the output "last"."""

    def __init__(self, pipeline: Pipeline, count: int = 2, *, pods: bool = False) -> None:
        """If `pods` is True, the replicas with the same number run on one host."""
        self.pipeline, self.registry = pipeline, ReplicaRegistry()
        self.planner = Planner(pipeline, self.registry)
        for stage, number in product(pipeline.stages, range(count)):
            host = f"pod-{number}" if pods else ""
            ready_replica(f"{stage}-{number}", pipeline, registry=self.registry, host=host)

    @property
    def of_b(self) -> tuple[Replica, ...]:
        """The replicas of stage b."""
        return self.registry.of("b")

    def add(self, generation: str, stages: str = "abc") -> list[Replica]:
        """Adds a replica of a generation to each of the stages."""
        names = [f"{stage}-{generation}" for stage in stages]
        return [ready_replica(name, self.pipeline, registry=self.registry, generation=generation) for name in names]

    def plan(self, **wishes: Any) -> Plan:
        return self.planner.plan(self.pipeline.route(["last"]), **wishes)

    def choices(self, stage: str = "b", **wishes: Any) -> set[str]:
        """Returns the replicas of a stage on which twenty requests are planned."""
        return {self.plan(**wishes).replicas[stage] for _ in range(20)}

    def whole_plans(self, **wishes: Any) -> set[frozenset[str]]:
        """Returns the combinations of replicas on which fifty requests are planned."""
        return {frozenset(self.plan(**wishes).replicas.values()) for _ in range(50)}


@pytest.fixture
def fleet(pipeline: Pipeline) -> _Fleet:
    """Two replicas of each stage."""
    return _Fleet(pipeline)


def test_requests_spread_over_the_replicas(fleet: _Fleet) -> None:
    assert sorted(fleet.plan().replicas["b"] for _ in range(4)) == ["b-0", "b-0", "b-1", "b-1"]


def test_a_released_plan_makes_its_replica_the_first_choice_again(fleet: _Fleet) -> None:
    first = fleet.plan()
    fleet.plan()
    first.release()
    first.release()
    assert fleet.plan().replicas["b"] == first.replicas["b"]
    assert [replica.running for replica in fleet.of_b] == [1, 1]


def test_a_preferred_replica_is_used_while_it_has_little_more_work(pipeline: Pipeline) -> None:
    fleet, preferred = _Fleet(pipeline, 3), {"b": "b-2"}
    busy = next(replica for replica in fleet.of_b if replica.name == "b-2")
    busy.load.report(0.2, steps=1)
    assert fleet.plan(preferred=preferred).replicas["b"] == "b-2"
    busy.load.report(5.0, steps=1)
    assert fleet.plan(preferred=preferred).replicas["b"] != "b-2"


def test_a_preferred_replica_that_is_not_ready_is_ignored(fleet: _Fleet) -> None:
    fleet.of_b[0].observe(ReplicaState.DRAINING, "")
    assert fleet.plan(preferred={"b": "b-0", "c": "unknown"}).replicas["b"] == "b-1"


def test_only_ready_replicas_are_chosen(fleet: _Fleet) -> None:
    fleet.of_b[0].observe(ReplicaState.DRAINING, "")
    assert fleet.choices() == {"b-1"}


def test_a_leaving_replica_gets_no_requests_even_if_it_reports_ready(fleet: _Fleet) -> None:
    leaving = fleet.of_b[0]
    leaving.leave("it left")
    leaving.observe(ReplicaState.READY, "")
    assert fleet.choices() == {"b-1"}
    assert (leaving.state, leaving.detail) == (ReplicaState.DRAINING, "it left")


def test_the_error_names_a_stage_without_a_ready_replica_and_their_states(fleet: _Fleet) -> None:
    fleet.of_b[0].observe(ReplicaState.LOADING, "reading weights")
    fleet.of_b[1].observe(ReplicaState.UNREACHABLE, "")
    with pytest.raises(UnavailableError, match=r"stage 'b' is ready: b-0 loading \(reading weights\), b-1 unreachable"):
        fleet.plan()
    assert fleet.registry.of("a")[0].running == 0


def test_an_error_names_a_few_of_many_replicas(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 100)
    for replica in fleet.of_b:
        replica.observe(ReplicaState.LOADING, "")
    with pytest.raises(UnavailableError, match="and 92 more") as caught:
        fleet.plan()
    assert len(caught.value.message) < 400


def test_a_stage_that_is_not_needed_need_not_be_ready(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 1)
    fleet.registry.of("c")[0].observe(ReplicaState.FAILED, "")
    assert set(fleet.planner.plan(pipeline.route(["first"])).replicas) == {"a"}


_OLD, _NEW = frozenset({"a-old", "b-old", "c-old"}), frozenset({"a-new", "b-new", "c-new"})


def test_a_plan_uses_one_generation(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 0)
    fleet.add("old")
    fleet.add("new")
    assert fleet.whole_plans() == {_OLD, _NEW}


def test_a_request_continues_in_its_generation_or_not_at_all(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 1)
    _, new, _ = fleet.add("new")
    assert fleet.whole_plans(generation="new") == {_NEW}
    new.observe(ReplicaState.LOADING, "")
    with pytest.raises(NotReadyYetError):
        fleet.plan(generation="new")
    fleet.registry.remove(new)
    with raises(NotReadyError, reason="GENERATION_ENDED", match="began in generation new"):
        fleet.plan(generation="new")


def test_a_generation_gets_requests_once_all_its_stages_are_ready(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 1)
    fleet.add("new", "a")
    assert fleet.choices("a") == {"a-0"}
    fleet.of_b[0].observe(ReplicaState.DRAINING, "")
    fleet.add("new", "b")
    with pytest.raises(UnavailableError, match="no generation has one of every stage"):
        fleet.plan()


@pytest.fixture
def pods(tmp_path: Path) -> _Fleet:
    """A chain whose stages a and b are connected by a fixed shm edge, with a replica of each on two hosts."""
    return _Fleet(load(tmp_path, CHAIN.replace("{from: a, to: b}", "{from: a, to: b, connector: shm}")), pods=True)


def test_stages_with_a_fixed_shm_edge_are_planned_on_one_host(pods: _Fleet) -> None:
    pods.of_b[0].load.place()
    plans = [pods.plan().replicas for _ in range(20)]
    assert {plan["a"][-1] == plan["b"][-1] for plan in plans} == {True}
    assert {plan["a"] for plan in plans} == {"a-0", "a-1"}


def test_a_lost_stage_with_a_fixed_shm_edge_stays_on_the_host_of_its_peer_unless_the_peer_ended(pods: _Fleet) -> None:
    plan = pods.plan()
    first, second = plan.steps["a"].replica, plan.steps["b"].replica
    second.observe(ReplicaState.UNREACHABLE, "")
    with pytest.raises(UnavailableError, match="no replica of stage 'b' is ready"):
        pods.planner.choose_again("b", plan, avoid=[second])
    first.end(first.loss("terminated"))
    assert pods.planner.choose_again("b", plan, avoid=[second]).host != second.host


def test_both_ends_of_a_fixed_shm_edge_move_away_from_a_pod_that_is_drained(pods: _Fleet) -> None:
    planner, plan = pods.planner, pods.plan()
    drained = {stage: plan.steps[stage].replica for stage in ("a", "b")}
    # A reservation is shown as a drain, but the request continues on the reserved replica.
    release = drained["b"].reserve("it runs one request alone")
    assert planner.choose_again("a", plan, avoid=[]) is drained["a"]
    release()
    for replica in drained.values():
        replica.observe(ReplicaState.DRAINING, "drained by an operator")
    first = planner.choose_again("a", plan, avoid=[drained["a"]])
    plan.move("a", first)
    assert planner.choose_again("b", plan, avoid=[drained["b"]]).host == first.host != drained["a"].host


def test_another_replica_of_the_generation_is_chosen_again(fleet: _Fleet) -> None:
    fleet.add("new", "b")
    plan = fleet.plan()
    lost = plan.steps["b"].replica
    again = fleet.planner.choose_again("b", plan, avoid=[lost])
    assert again in set(fleet.of_b[:2]) - {lost}
    with pytest.raises(UnavailableError, match="no replica of stage 'b'"):
        fleet.planner.choose_again("b", plan, avoid=[lost, again])


def _report(replica: Replica, *adapters: str) -> None:
    replica.record_load(stage_pb2.WatchLoadResponse(adapters=adapters))


def test_a_request_runs_on_replicas_that_have_its_adapter(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 3)
    for replica, adapters in zip(fleet.of_b, ((), ("x",), ("x", "y")), strict=True):
        _report(replica, *adapters)
    plans = [fleet.plan(adapters={"b": "x"}) for _ in range(20)]
    assert {plan.replicas["b"] for plan in plans} == {"b-1", "b-2"}
    assert fleet.choices() == {"b-0", "b-1", "b-2"}
    lost = fleet.of_b[1]
    assert {fleet.planner.choose_again("b", plan, avoid=[lost]).name for plan in plans} == {"b-2"}
    assert {fleet.plan(adapters={"b": "y*0.5+x"}).replicas["b"] for _ in range(9)} == {"b-2"}
    _report(fleet.of_b[2], "y")
    with pytest.raises(UnavailableError):
        fleet.planner.choose_again("b", plans[0], avoid=[lost])


def test_a_generation_without_the_adapter_is_not_chosen(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 1)
    for replica in fleet.add("new"):
        _report(replica, "x")
    assert {fleet.plan(adapters={"b": "x"}).generation for _ in range(20)} == {"new"}


def test_an_unknown_adapter_is_not_found(pipeline: Pipeline) -> None:
    fleet = _Fleet(pipeline, 1)
    _report(fleet.of_b[0], "y")
    for selection in ("x", "y+x*0.5"):
        with raises(NotFoundError, reason="UNKNOWN_ADAPTER", match=f"has adapter '{re.escape(selection)}'; loaded: y"):
            fleet.plan(adapters={"b": selection})
    with raises(InvalidRequestError, reason="INVALID_ADAPTER", match="'x' is selected twice"):
        fleet.plan(adapters={"b": "x+x"})


@pytest.mark.parametrize("reported", [True, False], ids=["remembered", "not reported"])
def test_a_request_waits_for_an_adapter_that_is_about_to_be_loaded(pipeline: Pipeline, reported: bool) -> None:
    fleet, adapters = _Fleet(pipeline, 1), StageAdapters()
    if reported:
        _report(fleet.of_b[0])
        adapters.remember("b", "x", "/x")
    planner = Planner(pipeline, fleet.registry, adapters=adapters)
    with pytest.raises(NotReadyYetError, match="has loaded adapter 'x' yet"):
        planner.plan(pipeline.route(["last"]), adapters={"b": "x"})


def test_the_end_of_a_replica_is_reported_to_its_callbacks(pipeline: Pipeline) -> None:
    replica = ready_replica("a-0", pipeline)
    received: list[StagemeshError] = []
    replica.on_end(received.append)
    take_back = replica.on_end(lambda _: pytest.fail("it was taken back"))
    take_back()
    for cause in ("died", "died again"):
        replica.end(UnavailableError(cause))
    replica.on_end(received.append)
    assert [error.message for error in received] == ["died", "died"]


def _described(pipeline: Pipeline, description: stage_pb2.DescribeResponse, *generations: str) -> Replica:
    """Returns a replica of stage a that has described itself. `generations` are accepted, too."""
    replica = Replica(Member("a", "h:1", "a-0"), cast("ReplicaClient", None), on_change=lambda: None)
    replica.observe_description(description, pipeline, generations=generations)
    return replica


@pytest.mark.parametrize(
    "fields",
    [
        {"generation": "other"},
        {"pipeline": "other"},
        {"stage": "other"},
        {"protocol": Protocol(lowest_version=2, highest_version=3)},
        {"protocol": Protocol()},
        {"signature": signature_pb2.Signature(sampling=True)},
    ],
    ids=str,
)
def test_a_replica_of_another_pipeline_is_rejected(pipeline: Pipeline, fields: dict[str, Any]) -> None:
    description = ready_description("a", pipeline=pipeline)
    for field in fields:
        description.ClearField(field)  # type: ignore[arg-type]
    description.MergeFrom(stage_pb2.DescribeResponse(**fields))
    replica = _described(pipeline, description)
    assert replica.state is ReplicaState.FAILED
    assert replica.detail.startswith("refused: replica a-0 speaks" if "protocol" in fields else "refused: its ")


_EARLIER = {
    "same signature": ("earl*", True, ""),
    "other signature": ("earl*", False, "an orchestrator of its own generation uses it"),
    "not accepted": ("later-*", True, "refused: its generation is earlier, expected"),
}


@pytest.mark.parametrize(("accepted", "same", "detail"), _EARLIER.values(), ids=_EARLIER)
def test_an_accepted_generation_has_the_signature(pipeline: Pipeline, accepted: str, same: bool, detail: str) -> None:
    signature = signature_to_wire(pipeline.stages["a"].signature)
    signature.sampling ^= not same
    description = ready_description("a", pipeline=pipeline, generation="earlier")
    description.signature.CopyFrom(signature)
    replica = _described(pipeline, description, accepted)
    assert replica.state is (ReplicaState.FAILED if detail else ReplicaState.READY)
    assert detail in replica.detail


async def test_the_orchestrator_serves_once_every_stage_is_ready(tmp_path: Path) -> None:
    async with mesh(tmp_path, ready=False) as chain:
        live = await check(chain.channel)(Request(service="liveness"))
        await until_health(chain.channel, serving=True)
        whole = await check(chain.channel)(Request(service="stagemesh.v1.OrchestratorService"))
    assert (live.status, whole.status) == (Response.SERVING, Response.SERVING)


async def test_the_pipeline_is_described_as_it_is_now(chain: Mesh) -> None:
    described = await chain.describe()
    assert [stage.name for stage in described.stages] == ["a", "b", "c"]
    edges = [(edge.name, edge.from_stage, edge.to_stage) for edge in described.edges]
    assert edges == [("a->b", "a", "b"), ("b->c", "b", "c")]
    kinds = {output.name: output.kind for output in described.outputs}
    assert kinds == {"first": TENSOR_KIND_TEXT, "last": TENSOR_KIND_TEXT}


def test_an_unknown_state_counts_as_a_failure(pipeline: Pipeline) -> None:
    description = ready_description("a", pipeline=pipeline)
    description.state = 900  # type: ignore[assignment]
    assert _described(pipeline, description).state is ReplicaState.FAILED
