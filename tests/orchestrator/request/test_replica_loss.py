"""Requests whose replicas die while they run, or which continue at another orchestrator, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from stagemesh.common.errors import CancelledRequestError, ExistsError, InternalError, NotReadyError, UnavailableError
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import Member
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.lifecycle import STAGE_WAIT_S
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2, stage_pb2
from tests.orchestrator.mesh import ask
from tests.orchestrator.simulated_replicas import Members, SimulatedReplica, Step, World
from tests.orchestrator.virtual_time import in_virtual_time
from tests.rpc.call_errors import raises

_SPOKEN = {"first": "a0é🙂 a1é🙂 a2é🙂 a3é🙂 a4é🙂 ", "last": "c0é🙂 c1é🙂 c2é🙂 c3é🙂 c4é🙂 "}
_Blow: TypeAlias = Callable[[SimulatedReplica], object]


@dataclass
class _Mesh:
    """An orchestrator over simulated replicas, and what its client receives."""

    orchestrator: Orchestrator
    world: World
    choices: int = 1
    replicas: dict[str, str] = field(default_factory=dict[str, str])
    """The replica that was chosen first, by stage."""
    spoken: dict[str, str] = field(default_factory=dict[str, str])
    """The text that the client received, by output. The index of a choice precedes the outputs of further choices."""
    generations: list[str] = field(default_factory=list[str])
    """The generation in each RequestAdmitted."""
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, request_id: str = "r", **fields: Any) -> dict[str, str]:
        """Runs a request and returns the text of each output."""
        request = ask(**{"request_id": request_id, "parameters": {"choices": self.choices}, **fields})
        async with aclosing(await self.orchestrator.generate(request, time_left_s=60.0)) as events:
            async for event in events:
                self._add_event(orchestrator_pb2.GenerateResponse.FromString(event))
        return self.spoken

    def _add_event(self, event: orchestrator_pb2.GenerateResponse) -> None:
        if event.HasField("admitted"):
            self.replicas = dict(event.admitted.choices[0].replicas)
            self.generations.append(event.admitted.generation)
            self.began.set()
        elif event.HasField("output"):
            index, name = event.output.index, event.output.name
            key = f"{index} {name}" if index else name
            self.spoken[key] = self.spoken.get(key, "") + event.output.text

    def of(self, stage: str) -> SimulatedReplica:
        """Returns the replica that was chosen first."""
        return self.world.replicas[self.replicas[stage]]

    def timeline(self, request_id: str = "r") -> Timeline:
        """Returns the timeline of a request."""
        found = self.orchestrator.history.find(request_id)
        assert found is not None
        return found

    def attempts(self, stage: str) -> list[int]:
        """Returns the number of attempts of a stage."""
        return [notes.attempt for notes in self.timeline().steps if notes.stage == stage]


@pytest.fixture
def world(pipeline: Pipeline) -> World:
    return World(pipeline)


@asynccontextmanager
async def _orchestrating(world: World, *, replicas: int = 2, choices: int = 1) -> AsyncGenerator[_Mesh]:
    """Runs an orchestrator over the replicas of the world, which several orchestrators share."""
    clock = asyncio.get_running_loop().time
    members = Members(world.pipeline, replicas)
    fleet = Fleet(world.pipeline, [members], generations=["new-*"], connect=world.connect, clock=clock)
    orchestrator = Orchestrator(world.pipeline, fleet, max_request_s=60.0, drain_s=60.0, clock=clock)
    async with fleet.watched(), orchestrator.running():
        await asyncio.sleep(0.5)
        assert fleet.ready
        yield _Mesh(orchestrator, world, choices)


@asynccontextmanager
async def _running(
    world: World, *, replicas: int = 2, choices: int = 1, spoken: Mapping[str, str] = _SPOKEN
) -> AsyncGenerator[_Mesh]:
    """Runs a request, which is admitted at the start of the block. Its outputs must be `spoken`."""
    async with _orchestrating(world, replicas=replicas, choices=choices) as mesh, asyncio.TaskGroup() as group:
        group.create_task(mesh.ask())
        await mesh.began.wait()
        yield mesh
    assert mesh.spoken == spoken


@in_virtual_time
async def test_without_a_loss_every_stage_runs_once(world: World) -> None:
    async with _running(world) as mesh:
        pass
    assert [mesh.attempts(stage) for stage in "abc"] == [[1], [1], [1]]


async def _run_with_loss(
    world: World, stage: str, *, after_s: float, blow: _Blow = SimulatedReplica.die, replicas: int = 2
) -> _Mesh:
    """Runs a request, and strikes the replica of a stage `after_s` seconds after its admission."""
    async with _running(world, replicas=replicas) as mesh:
        await asyncio.sleep(after_s)
        blow(mesh.of(stage))
    return mesh


@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.45, 0.62])
@pytest.mark.parametrize("stage", ["a", "b", "c"])
@in_virtual_time
async def test_the_client_does_not_notice_that_a_stage_dies(world: World, stage: str, after_s: float) -> None:
    mesh = await _run_with_loss(world, stage, after_s=after_s)
    assert {name: mesh.attempts(name) for name in "abc" if name != stage and len(mesh.attempts(name)) > 1} == {}


@in_virtual_time
async def test_a_request_continues_soon_after_a_kill(world: World) -> None:
    mesh = await _run_with_loss(world, "b", after_s=0.25)
    first, second = (notes for notes in mesh.timeline().steps if notes.stage == "b")
    assert first.ended_s is not None and second.accepted_s is not None  # noqa: PT018
    assert second.accepted_s - first.ended_s < 0.3


@pytest.mark.parametrize("stage", ["a", "b", "c"])
@in_virtual_time
async def test_a_paused_stage_resumes_elsewhere(world: World, stage: str) -> None:
    mesh = await _run_with_loss(world, stage, after_s=0.45, blow=SimulatedReplica.pause_steps)
    first, second = (notes for notes in mesh.timeline().steps if notes.stage == stage)
    assert first.replica != second.replica
    assert first.error is not None
    assert first.error.reason == "DRAINED"
    (call,) = world.replicas[second.replica].calls
    assert (first.resumed_engine_steps, second.resumed_engine_steps) == (None, call.resume_from.engine_steps)
    assert second.resumed_engine_steps
    rebound = {notes.stage: [each.edges for each in notes.rebindings] for notes in mesh.timeline().steps}
    edges = {"a": {"b": [("a->b",)]}, "b": {"a": [("a->b",)], "c": [("b->c",)]}, "c": {"b": [("b->c",)]}}
    assert {name: found for name, found in rebound.items() if found} == edges[stage]
    assert world.made[stage] == world.rows


@in_virtual_time
async def test_a_stage_resumes_from_its_last_checkpoint(world: World) -> None:
    world.checkpoints = True
    await _run_with_loss(world, "b", after_s=0.45)
    assert world.made["b"] < 2 * world.rows - 2


@in_virtual_time
async def test_a_producer_without_its_first_chunk_restarts_too(world: World) -> None:
    world.keeps = False
    mesh = await _run_with_loss(world, "c", after_s=0.45)
    assert [len(mesh.attempts(stage)) for stage in "abc"] == [2, 2, 2]


@in_virtual_time
async def test_a_finished_stage_restarts_if_it_dies_before_it_has_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rebind_and_die(replica: SimulatedReplica, request: stage_pb2.RebindStepRequest) -> None:
        rebind(replica, request)
        if replica.member.stage == "a":
            replica.die()

    rebind = SimulatedReplica._rebind
    monkeypatch.setattr(SimulatedReplica, "_rebind", rebind_and_die)
    mesh = await _run_with_loss(world, "b", after_s=0.55)
    assert len(mesh.attempts("a")) == 2


_SEVERED = {"for a moment": ("b", 0.5, [1]), "for long": ("c", 30.0, [1, 2])}


@pytest.mark.parametrize(("stage", "for_s", "attempts"), _SEVERED.values(), ids=_SEVERED)
@in_virtual_time
async def test_a_brief_loss_replaces_no_replica(world: World, stage: str, for_s: float, attempts: list[int]) -> None:
    async with _running(world) as mesh:
        await asyncio.sleep(0.25)
        await mesh.of(stage).sever(for_s)
    assert mesh.attempts(stage) == attempts


@in_virtual_time
async def test_a_request_waits_for_the_only_replica(world: World) -> None:
    mesh = await _run_with_loss(world, "b", after_s=0.25, replicas=1)
    assert [notes.replica for notes in mesh.timeline().steps if notes.stage == "b"] == ["b-0", "b-0"]


@pytest.mark.parametrize("blow", [SimulatedReplica.die, lambda replica: asyncio.ensure_future(replica.sever(3.0))])
@in_virtual_time
async def test_a_new_request_waits_for_the_only_replica(world: World, blow: _Blow) -> None:
    async with _orchestrating(world, replicas=1) as mesh:
        blow(world.replicas["b-0"])
        await asyncio.sleep(0.5)
        assert not mesh.orchestrator.fleet.ready
        assert await mesh.ask() == _SPOKEN


@in_virtual_time
async def test_a_new_request_waits_for_a_replica_for_a_limited_time(world: World) -> None:
    async with _orchestrating(world, replicas=1) as mesh:
        severed = asyncio.create_task(world.replicas["b-0"].sever(1000.0))
        await asyncio.sleep(0.5)
        began_s = asyncio.get_running_loop().time()
        with raises(UnavailableError, reason="STAGE_NOT_READY", match="no replica of stage 'b' is ready"):
            await mesh.ask()
        severed.cancel()
        assert STAGE_WAIT_S <= asyncio.get_running_loop().time() - began_s < STAGE_WAIT_S + 1.0


@in_virtual_time
async def test_a_request_that_waits_for_a_replica_can_be_cancelled(world: World) -> None:
    async with _orchestrating(world, replicas=1) as mesh, asyncio.timeout(2.0):
        severed = asyncio.create_task(world.replicas["b-0"].sever(1000.0))
        await asyncio.sleep(0.5)
        asking = asyncio.create_task(mesh.ask())
        await asyncio.sleep(0.5)
        await mesh.orchestrator.cancel("r")
        with pytest.raises(CancelledRequestError):
            await asking
        severed.cancel()


@in_virtual_time
async def test_a_dying_process_that_is_chosen_again_counts_as_one_death(world: World) -> None:
    async with _running(world, replicas=1) as mesh:
        await asyncio.sleep(0.25)
        mesh.of("b").fail()
        await asyncio.sleep(2.0)
        assert mesh.of("b").steps
        mesh.of("b").die()
    tried = [notes.error.reason for notes in mesh.timeline().steps if notes.stage == "b" and notes.error is not None]
    assert tried.count("ENGINE_DIED") > 1


@in_virtual_time
async def test_a_dying_process_that_is_chosen_alone_is_not_a_third_death(world: World) -> None:
    async with _running(world) as mesh:
        first = mesh.of("b")
        second = next(each for each in world.replicas.values() if each.member.stage == "b" and each is not first)
        await asyncio.sleep(0.25)
        first.die()
        while not second.steps:
            await asyncio.sleep(0.01)
        second.fail()
    tried = [(notes.replica, notes.error.reason) for notes in mesh.timeline().steps if notes.error is not None]
    assert tried.count((tried[-1][0], "ENGINE_DIED")) > 1


@pytest.mark.parametrize("choices", [1, 3])
@in_virtual_time
async def test_a_request_that_kills_its_replicas_fails_alone(world: World, choices: int) -> None:
    def kill(step: Step) -> None:
        if step.request.request_id.startswith("poison") and step.replica.member.stage == "b":
            asyncio.get_running_loop().call_soon(step.replica.die)

    world.on_row = kill
    async with _orchestrating(world, replicas=3) as mesh, asyncio.TaskGroup() as group:
        good = group.create_task(mesh.ask("good"))
        with raises(InternalError, reason="POISON_REQUEST", match="the request is probably the cause"):
            await _Mesh(mesh.orchestrator, world, choices).ask("poison")
        assert await good == _SPOKEN
        # Each choice may have killed two processes before one of them runs alone.
        assert 3 <= sum(replica.deaths for replica in world.replicas.values()) <= 2 * choices + 1


# -- generations


def _add_generation(mesh: _Mesh) -> None:
    """Adds a replica of a new generation to each stage."""
    for stage in mesh.world.pipeline.stages:
        mesh.world.generations[f"{stage}-new"] = "new-1"
        mesh.orchestrator.fleet.join(Member(stage, f"h:{stage}-new", f"{stage}-new"))


async def _upgrade(mesh: _Mesh, *, after_s: float) -> None:
    """Adds a new generation, and removes the former replica of stage b after a while."""
    _add_generation(mesh)
    await asyncio.sleep(after_s)
    former = mesh.world.replicas["b-0"]
    mesh.orchestrator.fleet.leave(former.member, "it was deleted")
    former.die()


@in_virtual_time
async def test_a_request_without_outputs_restarts_in_a_new_generation(world: World) -> None:
    async with _running(world, replicas=1) as mesh:
        await _upgrade(mesh, after_s=0.05)
    assert mesh.generations[1:] == ["new-1"]
    last = {notes.stage: notes.replica for notes in mesh.timeline().steps}
    assert last == {stage: f"{stage}-new" for stage in "abc"}
    (call,) = world.replicas["a-new"].calls
    assert call.attempt > max(call.attempt for call in world.replicas["a-0"].calls)
    assert not world.replicas["a-0"].steps


@in_virtual_time
async def test_a_request_with_outputs_fails_when_its_generation_ends(world: World) -> None:
    async with _orchestrating(world, replicas=1) as mesh, asyncio.timeout(5):
        asking = asyncio.create_task(mesh.ask())
        await mesh.began.wait()
        await _upgrade(mesh, after_s=0.25)
        with raises(NotReadyError, reason="GENERATION_ENDED", match="of which stage 'b' has no replica left"):
            await asking


@in_virtual_time
async def test_all_choices_of_a_request_run_in_the_generation_whose_outputs_the_client_has(world: World) -> None:
    async with _orchestrating(world, replicas=1, choices=3) as mesh:
        _add_generation(mesh)
        await asyncio.sleep(0.1)
        for number in range(4):
            await mesh.ask(str(number), generation="new-1")
        steps = [notes for each in range(4) for notes in mesh.timeline(str(each)).steps]
        assert {notes.replica for notes in steps} == {"a-new", "b-new", "c-new"}
        with pytest.raises(NotReadyError, match="began in generation gone"):
            await mesh.ask("late", generation="gone")


@in_virtual_time
async def test_a_request_waits_for_its_generation_while_its_replica_may_return(world: World) -> None:
    async with _running(world, replicas=1) as mesh:
        _add_generation(mesh)
        await asyncio.sleep(0.25)
        mesh.of("b").die()
    assert {notes.replica for notes in mesh.timeline().steps} == {"a-0", "b-0", "c-0"}


# -- several orchestrators


@asynccontextmanager
async def _continuing(world: World) -> AsyncGenerator[tuple[_Mesh, "asyncio.Task[object]", _Mesh]]:
    """Calls one orchestrator and, 0.25 s later, another one with the same request. Yields both, with the first call."""
    async with _orchestrating(world) as first, _orchestrating(world) as second, asyncio.TaskGroup() as group:
        calling = asyncio.create_task(first.ask(parameters={"seed": 0}))
        await asyncio.sleep(0.25)
        fields: dict[str, Any] = {"earlier_calls": 1, "admitted_call": 0, "preferred_replicas": first.replicas}
        continued = group.create_task(second.ask(parameters={"seed": 0}, **fields))
        yield first, calling, second
        await continued
        calling.cancel()
        await asyncio.wait([calling])
    assert second.spoken == _SPOKEN


_THEFTS: dict[str, dict[str, Any]] = {
    "later attempts": {"earlier_calls": 1_000_000},
    "the same attempts": {"input": {"text": "another"}},
    "the steps that run": {"earlier_calls": 1, "admitted_call": 0, "parameters": {"seed": 0}},
}


@pytest.mark.parametrize("theft", _THEFTS.values(), ids=_THEFTS)
@in_virtual_time
async def test_another_caller_cannot_end_or_join_a_request_whose_id_it_knows(
    world: World, theft: dict[str, Any]
) -> None:
    async with _orchestrating(world) as first, _orchestrating(world) as second, asyncio.TaskGroup() as group:
        group.create_task(first.ask(caller="alice", parameters={"seed": 0}))
        await asyncio.sleep(0.25)
        running = asyncio.create_task(second.ask(caller="mallory", preferred_replicas=first.replicas, **theft))
        await second.began.wait()
        await asyncio.sleep(0.1)
        await second.orchestrator.cancel("r", may_act_for=lambda _: True)
        await asyncio.wait([running])
        assert running.exception() is not None, "the request of the other caller was cancelled"
    assert (first.spoken, _tried(first)) == (_SPOKEN, {1})


@in_virtual_time
async def test_another_caller_cannot_discard_the_result_of_a_request(world: World) -> None:
    async with _orchestrating(world) as mesh:
        await mesh.ask(caller="alice")
        with raises(ExistsError, reason="REQUEST_EXISTS"):
            mesh.orchestrator.requests.discard_ended("r", caller="mallory")
        assert mesh.orchestrator.requests.find("r") is not None
        mesh.orchestrator.requests.discard_ended("r", caller="alice")
        assert mesh.orchestrator.requests.find("r") is None


def _tried(mesh: _Mesh) -> set[int]:
    """Returns the attempts with which an orchestrator ran the request."""
    return {notes.attempt for notes in mesh.timeline().steps}


@pytest.mark.parametrize("left", [False, True], ids=["both are called", "the client has left one"])
@in_virtual_time
async def test_running_steps_continue_at_another_orchestrator(world: World, left: bool) -> None:
    async with _continuing(world) as (first, calling, second):
        if left:
            await asyncio.sleep(0.1)
            await first.orchestrator.cancel("r", when_left=True, may_act_for=lambda _: True)
            calling.cancel()
    assert _tried(second) == {1}
    assert world.made == dict.fromkeys("abc", world.rows), "no stage computes a row twice"


@in_virtual_time
async def test_a_request_runs_again_if_the_other_orchestrator_cancels_its_steps(world: World) -> None:
    async with _continuing(world) as (first, _, second):
        await asyncio.sleep(0.1)
        await first.orchestrator.cancel("r", when_left=False, may_act_for=lambda _: True)
    assert max(_tried(second)) > 1000


@in_virtual_time
async def test_a_request_runs_again_if_a_replica_has_restarted(world: World) -> None:
    async with _continuing(world) as (first, calling, second):
        first.of("b").die()
        with raises(UnavailableError, reason="NOT_RUNNING"):
            await calling
        assert first.orchestrator.requests.find("r") is None, "the client may return"
    assert _tried(second) == {1001}


@in_virtual_time
async def test_a_request_runs_again_although_its_replicas_release_it_late(world: World) -> None:
    async with _continuing(world) as (_, _, second):
        await asyncio.sleep(0.1)
        world.delay_s = 2.0
        second.of("c").end_step("r/c/1", CancelledRequestError("it was cancelled"))
    assert max(_tried(second)) > 1000


@in_virtual_time
async def test_a_request_runs_again_if_its_replicas_are_unknown(world: World) -> None:
    async with _orchestrating(world) as mesh:
        spoken = await mesh.ask(earlier_calls=1, admitted_call=0, preferred_replicas={"a": "gone-0"}, parameters={})
    assert spoken == _SPOKEN
    assert _tried(mesh) == {1001}
