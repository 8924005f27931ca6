"""Replicas join, restart and leave while the fleet is watched, in virtual time and without gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, cast

import pytest

from stagemesh.common.errors import NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connector_agreement import EdgeProbe
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import Member, MembershipListener
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient, Verdict
from stagemesh.orchestrator.planning.planner import Planner
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import stage_pb2
from tests.orchestrator.mesh import CHAIN, load
from tests.orchestrator.simulated_replicas import SimulatedReplica, World
from tests.orchestrator.virtual_time import in_virtual_time

_NONE = stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED
_RELEASED, _WITHHELD = stage_pb2.ROLLOUT_VERDICT_RELEASED, stage_pb2.ROLLOUT_VERDICT_WITHHELD


class _Stage(SimulatedReplica):
    """The client of a simulated process at an address, which the test ends and restarts."""

    work_s, closed = 0.0, False

    def __init__(self, member: Member, world: World) -> None:
        super().__init__(member, world)
        self.refused_consumers: set[str] = set()
        self.verdicts: list[Verdict] = []
        """The verdict of each call for load reports."""

    async def probe_edge(self, edge: str, consumer: ConsumerAddress, *_: object, **__: object) -> EdgeProbe:
        if consumer.replica in self.refused_consumers:
            raise NotReadyError(f"connector nixl cannot be used with replica {consumer.replica}")
        return EdgeProbe("shm", {})

    async def watch_load(self, verdict: Verdict) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        self.verdicts.append(verdict)
        while True:
            yield stage_pb2.WatchLoadResponse(work_s=self.work_s, running=1)
            await self.world.changed.wait()

    async def close(self) -> None:
        self.closed = True

    def vanish(self, *, listening: bool) -> None:
        """Makes the process unreachable. It has died unless it is still `listening`."""
        self.dead, self.cut = not listening, True
        self.world.changed.fire()

    def restart(self, incarnation: str) -> None:
        """Starts another process at the address."""
        self.dead = self.cut = False
        self.description.incarnation = incarnation
        self.world.changed.fire()


class _World(World):
    """A fleet over simulated processes, at first one for each stage, and the source of its members."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.fleet = Fleet(
            pipeline,
            [self],
            generations=["new-*"],
            connect=self.connect,
            clock=lambda: asyncio.get_running_loop().time(),
        )
        self.stages: dict[str, _Stage] = {}
        self.members = {stage: Member(stage, f"h:{stage}", f"{stage}-0") for stage in pipeline.stages}

    async def follow(self, listener: MembershipListener) -> None:
        for member in self.members.values():
            listener.join(member)

    async def start(self, endpoint: str, name: str = "", **description: Any) -> None:
        """Starts a replica of stage b that describes itself so."""
        self.fleet.join(Member("b", endpoint, name))
        self.stages[endpoint].description.MergeFrom(stage_pb2.DescribeResponse(**description))
        await asyncio.sleep(0.1)

    async def upgrade(self, stages: str, *, generation: str) -> None:
        """Starts a replica of another generation in each of these stages."""
        for stage in stages:
            endpoint = f"{generation}:{stage}"
            self.fleet.join(Member(stage, endpoint, endpoint))
            self.stages[endpoint].description.generation = generation
        await asyncio.sleep(0.1)

    def verdicts(self, generation: str) -> list[list[Verdict]]:
        """Returns the verdicts that the replicas of a generation received."""
        return [stage.verdicts for name, stage in self.stages.items() if name.startswith(generation)]

    def connect(self, member: Member) -> ReplicaClient:
        self.stages[member.endpoint] = _Stage(member, self)
        return cast("ReplicaClient", self.stages[member.endpoint])


@pytest.fixture
def text() -> str:
    """The text of the pipeline file."""
    return CHAIN


@pytest.fixture
def pipeline(tmp_path: Path, text: str) -> Pipeline:
    return load(tmp_path, text)


@pytest.fixture
def world(pipeline: Pipeline) -> _World:
    return _World(pipeline)


def _played(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorates a test that begins when its world is ready. When it ends, the fleet closes everything."""

    @wraps(scene)
    async def play(world: _World, **fixtures: object) -> None:
        async with world.fleet.watched():
            await asyncio.sleep(0.1)
            assert world.fleet.ready
            await scene(world=world, **fixtures)
        await asyncio.sleep(0)
        assert all(stage.closed for stage in world.stages.values())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return in_virtual_time(play)


@_played
async def test_a_replica_joins_and_leaves_while_it_runs(world: _World, pipeline: Pipeline) -> None:
    before = len(asyncio.all_tasks())
    late = Member("b", "h:late", "b-1")
    for _ in range(3):
        world.fleet.join(late)
        await asyncio.sleep(0.1)
        assert [replica.state for replica in world.fleet.replicas["b"]] == [ReplicaState.READY] * 2
        assert len(world.fleet.edge_connectors.links_of(pipeline.edges[0])) == 2
        world.fleet.leave(late, "it left")
        await asyncio.sleep(0.1)
        assert [replica.name for replica in world.fleet.replicas["b"]] == ["b-0"]
        assert len(world.fleet.edge_connectors.links_of(pipeline.edges[0])) == 1
        assert world.stages["h:late"].closed
    assert len(asyncio.all_tasks()) == before


@_played
async def test_a_member_of_two_sources_leaves_with_the_last(world: _World) -> None:
    member = world.members["b"]
    world.fleet.join(Member("b", member.endpoint))
    assert len(world.fleet.replicas["b"]) == 1
    world.fleet.leave(member, "one")
    await asyncio.sleep(0.1)
    assert world.fleet.ready
    world.fleet.leave(Member("b", member.endpoint), "two")
    await asyncio.sleep(0.1)
    assert not world.fleet.ready


@_played
async def test_a_leaving_replica_is_closed_once_its_requests_have_ended(world: _World, pipeline: Pipeline) -> None:
    plan = Planner(pipeline, world.fleet.registry).plan(pipeline.route(["last"]))
    world.fleet.leave(world.members["b"], "it left")
    await asyncio.sleep(60)
    (replica,) = world.fleet.replicas["b"]
    assert (replica.state, replica.end_cause) == (ReplicaState.DRAINING, None)
    assert not world.stages["h:b"].closed
    plan.release()
    await asyncio.sleep(0.1)
    assert world.stages["h:b"].closed
    assert not world.fleet.replicas["b"]


@_played
async def test_a_restarted_process_is_another_replica(world: _World, pipeline: Pipeline) -> None:
    plan = Planner(pipeline, world.fleet.registry).plan(pipeline.route(["last"]))
    world.stages["h:b"].work_s = 9.0
    world.changed.fire()
    await asyncio.sleep(0.1)
    (former,) = world.fleet.replicas["b"]
    world.stages["h:b"].work_s = 0.0
    world.stages["h:b"].restart("two")
    await asyncio.sleep(1)
    (now,) = world.fleet.replicas["b"]
    assert former.end_cause is not None
    assert former.end_cause.reason == "REPLICA_RESTARTED"
    assert (now.name, now.incarnation, now.state) == ("b-0", "two", ReplicaState.READY)
    assert (now.running, now.end_cause) == (0, None)
    assert (former.load.work_s > 5, now.load.work_s) == (True, 0)
    plan.release()
    assert (former.running, now.running) == (0, 0)


@pytest.mark.parametrize(("listening", "at_least_s", "at_most_s"), [(False, 0.0, 1.0), (True, 15.0, 20.0)])
@_played
async def test_a_lost_replica_ends_in_time(world: _World, listening: bool, at_least_s: float, at_most_s: float) -> None:
    loop = asyncio.get_running_loop()
    (replica,) = world.fleet.replicas["b"]
    gone: asyncio.Future[StagemeshError] = loop.create_future()
    replica.on_end(gone.set_result)
    began_s = loop.time()
    world.stages["h:b"].vanish(listening=listening)
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert replica.state is ReplicaState.UNREACHABLE
    cause = await asyncio.wait_for(gone, 60)
    assert cause.reason == "REPLICA_LOST"
    assert at_least_s <= loop.time() - began_s <= at_most_s


@_played
async def test_a_replica_that_was_briefly_unreachable_is_the_same(world: _World) -> None:
    (before,) = world.fleet.replicas["b"]
    world.stages["h:b"].vanish(listening=True)
    await asyncio.sleep(5)
    assert not world.fleet.ready
    world.stages["h:b"].restart("life 0")
    await asyncio.sleep(3)
    assert world.fleet.replicas["b"] == (before,)
    assert (before.state, before.end_cause) == (ReplicaState.READY, None)


@_played
async def test_a_replica_that_lost_a_step_is_asked_for_its_state(world: _World) -> None:
    (replica,) = world.fleet.replicas["b"]
    replica.doubt(UnavailableError("it does not answer"))
    assert (replica.state, world.fleet.ready) == (ReplicaState.UNREACHABLE, False)
    await asyncio.sleep(1)
    assert (replica.state, replica.end_cause, world.fleet.ready) == (ReplicaState.READY, None, True)


@_played
async def test_an_engine_that_failed_ends_its_replica(world: _World) -> None:
    (replica,) = world.fleet.replicas["b"]
    world.stages["h:b"].description.state = stage_pb2.REPLICA_STATE_FAILED
    world.stages["h:b"].description.detail = "out of memory"
    world.changed.fire()
    await asyncio.sleep(5)
    assert replica.end_cause is not None
    assert "failed (out of memory)" in replica.end_cause.message
    assert world.fleet.replicas["b"] == (replica,)


@pytest.mark.parametrize("known_as", ["", "b-6"], ids=["by its address", "where another one was"])
@_played
async def test_a_replica_takes_the_name_that_it_reports_if_it_is_a_member_as_this(world: _World, known_as: str) -> None:
    await world.start("10.0.0.1:7", known_as, replica="b-7")
    if known_as:
        refused = world.fleet.replicas["b"][1]
        assert (refused.name, refused.state) == ("b-6", ReplicaState.FAILED)
        assert "it is named b-7, not b-6" in refused.detail
        world.fleet.join(Member("b", "10.0.0.1:7", "b-7"))
        await asyncio.sleep(1)
    last = world.fleet.replicas["b"][1]
    assert (last.name, last.state) == ("b-7", ReplicaState.READY)


@pytest.mark.parametrize("field", ["replica", "incarnation", "host", "zone", "generation"])
@_played
async def test_a_replica_with_an_endless_name_is_not_used(world: _World, field: str) -> None:
    await world.start("10.0.0.1:7", detail="x" * 5000, **{field: "x" * 257})
    replica = world.fleet.replicas["b"][1]
    assert (replica.state, replica.is_described) == (ReplicaState.UNREACHABLE, False)
    assert replica.detail == f"a replica reports a {field} of more than 256 characters; shorten it"
    replica.observe(ReplicaState.LOADING, "x" * 5000)
    assert len(replica.detail) == 4096


@_played
async def test_a_second_replica_of_a_name_is_rejected(world: _World, caplog: pytest.LogCaptureFixture) -> None:
    await world.start("10.0.0.1:7", replica="b-0")
    second = world.fleet.replicas["b"][1]
    assert second.state is ReplicaState.FAILED
    assert second.detail == "refused: the replica at h:b is also named b-0; rename one of them"
    await asyncio.sleep(5)
    assert [record.levelname for record in caplog.records if "is also named" in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("text", [CHAIN.replace("{from: a, to: b}", "{from: a, to: b, connector: nixl}")], ids=["nixl"])
@_played
async def test_a_joining_replica_without_its_connector_is_not_planned(
    world: _World, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    world.stages["h:a"].refused_consumers.add("b-1")
    await world.start("h:late", "b-1")
    good, broken = world.fleet.replicas["b"]
    assert world.fleet.ready
    assert (broken.name, broken.state) == ("b-1", ReplicaState.FAILED)
    assert broken.detail.endswith("from a-0 to b-1: connector nixl cannot be used with replica b-1")
    assert f"replica b-1 receives no requests: {broken.detail}" in caplog.messages
    route = pipeline.route(["last"])
    world.fleet.edge_connectors.check(route.edges)
    plans = [Planner(pipeline, world.fleet.registry).plan(route) for _ in range(20)]
    assert {plan.replicas["b"] for plan in plans} == {good.name}
    for plan in plans:
        plan.release()
    world.stages["h:a"].refused_consumers.clear()
    await asyncio.sleep(30)
    assert broken.state is ReplicaState.READY


@in_virtual_time
async def test_no_generation_is_judged_before_one_has_a_ready_replica_of_every_stage(world: _World) -> None:
    late = world.members.pop("c")
    async with world.fleet.watched():
        await asyncio.sleep(1)
        assert world.verdicts("h") == [[_NONE], [_NONE]]
        world.fleet.join(late)
        await asyncio.sleep(0.1)
        assert [verdicts[-1] for verdicts in world.verdicts("h")] == [_RELEASED] * 3


@_played
async def test_a_generation_is_withheld_until_every_stage_has_a_ready_replica_of_it(world: _World) -> None:
    await world.upgrade("ab", generation="new-1")
    assert world.verdicts("new-1") == [[_WITHHELD], [_WITHHELD]]
    await world.upgrade("c", generation="new-1")
    assert [verdicts[-1] for verdicts in world.verdicts("new-1")] == [_RELEASED] * 3
    assert [verdicts[-1] for verdicts in world.verdicts("h")] == [_RELEASED] * 3


@_played
async def test_a_refused_generation_is_withheld_even_if_it_is_complete(world: _World) -> None:
    await world.upgrade("abc", generation="other")
    assert world.verdicts("other") == [[_WITHHELD]] * 3
    assert [verdicts[-1] for verdicts in world.verdicts("h")] == [_RELEASED] * 3
    replica = world.fleet.replicas["a"][1]
    assert (replica.state, replica.last_report) == (ReplicaState.FAILED, None)


@_played
async def test_a_new_generation_stays_withheld_while_the_former_one_recovers(world: _World) -> None:
    await world.upgrade("ab", generation="new-1")
    world.stages["h:c"].vanish(listening=False)
    await asyncio.sleep(60)
    assert not world.fleet.ready
    assert world.verdicts("new-1") == [[_WITHHELD], [_WITHHELD]]
    assert [verdicts[-1] for verdicts in world.verdicts("h")] == [_RELEASED] * 3


@pytest.mark.parametrize(
    ("described", "why"),
    [
        # After an upgrade that moves ports, a stage may listen at the port at which another one listened before.
        ({"stage": "c"}, "its stage is c, expected b"),
        ({"pipeline": "another"}, "its pipeline is another, expected chain"),
    ],
)
@_played
async def test_a_replica_of_something_else_is_not_used(
    world: _World, pipeline: Pipeline, described: dict[str, str], why: str
) -> None:
    await world.start("h:moved", "c-1", **described)
    await asyncio.sleep(1)
    moved = world.fleet.replicas["b"][1]
    assert moved.is_refused
    assert (moved.state, moved.detail) == (ReplicaState.FAILED, f"refused: {why}")
    assert world.stages["h:moved"].verdicts == []
    planner = Planner(pipeline, world.fleet.registry)
    assert {planner.plan(pipeline.route(["last"])).replicas["b"] for _ in range(8)} == {"b-0"}
