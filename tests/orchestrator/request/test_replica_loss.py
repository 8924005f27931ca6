"""Requests whose replicas die while they run, in virtual time."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from benchmarks.simulation import virtual_time
from stagemesh.common.errors import CancelledRequestError, InternalError, NotReadyError, UnavailableError
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import Member
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.lifecycle import STAGE_WAIT_S
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.pipeline import Pipeline, load_pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.mesh import CHAIN, DIAMOND, ask
from tests.orchestrator.simulated_replicas import Members, SimulatedReplica, Step, World

_SPOKEN = {"first": "a0é a1é a2é a3é a4é ", "last": "c0é c1é c2é c3é c4é "}
_DIAMOND = DIAMOND.replace("chunk: {frames: 5, initial_frames: 2}", "chunk: {frames: 5}")


@dataclass
class _Mesh:
    """An orchestrator over simulated replicas."""

    orchestrator: Orchestrator
    world: World
    replicas: dict[str, str] = field(default_factory=dict[str, str])
    """The replica that was chosen first, by stage."""
    spoken: dict[str, str] = field(default_factory=dict[str, str])
    """The text that the client received, by output. The index of a choice precedes the outputs of further choices."""
    choices: int = 1
    generations: list[str] = field(default_factory=list[str])
    """The generation in each RequestAdmitted."""
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, request_id: str = "r", *, generation: str = "") -> dict[str, str]:
        """Runs a request and returns the text of each output."""
        parameters = request_pb2.Parameters(choices=self.choices)
        request = ask(request_id=request_id, parameters=parameters, generation=generation)
        async with aclosing(await self.orchestrator.generate(request, time_left_s=60.0)) as events:
            async for event in events:
                self._add_event(orchestrator_pb2.GenerateResponse.FromString(event))
        return self.spoken

    def _add_event(self, event: orchestrator_pb2.GenerateResponse) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                self.replicas = dict(event.admitted.choices[0].replicas)
                self.generations.append(event.admitted.generation)
                self.began.set()
            case "output":
                index, name = event.output.index, event.output.name
                key = f"{index} {name}" if index else name
                self.spoken[key] = self.spoken.get(key, "") + event.output.text
            case _:
                pass

    def of(self, stage: str) -> SimulatedReplica:
        """Returns the replica that was chosen first."""
        return self.world.replicas[self.replicas[stage]]

    @property
    def timeline(self) -> Timeline:
        """The request's timeline."""
        return self.timeline_of("r")

    def timeline_of(self, request_id: str) -> Timeline:
        """Returns the timeline of a request."""
        found = self.orchestrator.history.find(request_id)
        assert found is not None
        return found

    def attempts(self, stage: str) -> list[int]:
        """Returns the number of attempts of a stage."""
        return [notes.attempt for notes in self.timeline.steps if notes.stage == stage]


@pytest.fixture
def chain(tmp_path: Path) -> Pipeline:
    return _pipeline(tmp_path, CHAIN)


def _pipeline(folder: Path, text: str) -> Pipeline:
    (folder / "pipeline.yaml").write_text(text)
    return load_pipeline(str(folder / "pipeline.yaml"))


@asynccontextmanager
async def _mesh(world: World, *, replicas: int = 2, choices: int = 1) -> AsyncGenerator[_Mesh]:
    clock = asyncio.get_running_loop().time
    members = Members(world.pipeline, replicas)
    fleet = Fleet(world.pipeline, [members], generations=["new-*"], connect=world.connect, clock=clock)
    orchestrator = Orchestrator(world.pipeline, fleet, max_request_s=60.0, drain_s=60.0, clock=clock)
    async with fleet.watched(), orchestrator.running():
        await asyncio.sleep(0.5)
        assert fleet.ready
        yield _Mesh(orchestrator, world, choices=choices)


def _run(
    world: World, fault: Callable[[_Mesh], Coroutine[object, object, None]], *, replicas: int = 2, choices: int = 1
) -> _Mesh:
    """Runs a request together with `fault`. The request must succeed."""

    async def main() -> _Mesh:
        async with _mesh(world, replicas=replicas, choices=choices) as mesh, asyncio.TaskGroup() as group:
            asking = group.create_task(mesh.ask())
            await mesh.began.wait()
            await fault(mesh)
            await asking
        return mesh

    return virtual_time.run(main())


def _kill(stage: str, *, after_s: float) -> Callable[[_Mesh], Coroutine[object, object, None]]:
    async def fault(mesh: _Mesh) -> None:
        await asyncio.sleep(after_s)
        mesh.of(stage).die()

    return fault


async def _nothing(mesh: _Mesh) -> None:
    del mesh


def test_without_a_loss_every_stage_runs_once(chain: Pipeline) -> None:
    mesh = _run(World(chain), _nothing)
    assert mesh.spoken == _SPOKEN
    assert [mesh.attempts(stage) for stage in chain.stages] == [[1], [1], [1]]


@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.45, 0.62])
@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_the_client_does_not_notice_that_a_stage_dies(chain: Pipeline, stage: str, after_s: float) -> None:
    mesh = _run(World(chain), _kill(stage, after_s=after_s))
    assert mesh.spoken == _SPOKEN
    assert {name: mesh.attempts(name) for name in chain.stages if name != stage and len(mesh.attempts(name)) > 1} == {}


def test_a_request_continues_soon_after_a_kill(chain: Pipeline) -> None:
    mesh = _run(World(chain), _kill("b", after_s=0.25))
    first, second = (notes for notes in mesh.timeline.steps if notes.stage == "b")
    assert first.ended_s is not None and second.accepted_s is not None  # noqa: PT018
    assert second.accepted_s - first.ended_s < 0.3


def _pause_steps(stage: str, *, after_s: float) -> Callable[[_Mesh], Coroutine[object, object, None]]:
    async def fault(mesh: _Mesh) -> None:
        await asyncio.sleep(after_s)
        mesh.of(stage).pause_steps()

    return fault


@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_a_paused_stage_resumes_elsewhere(chain: Pipeline, stage: str) -> None:
    world = World(chain)
    mesh = _run(world, _pause_steps(stage, after_s=0.45))
    assert mesh.spoken == _SPOKEN
    first, second = (notes for notes in mesh.timeline.steps if notes.stage == stage)
    assert first.replica != second.replica
    assert first.error is not None
    assert first.error.reason == "DRAINED"
    (call,) = world.replicas[second.replica].calls
    assert (first.resumed_steps, second.resumed_steps) == (None, call.resume_from.steps)
    assert second.resumed_steps
    rebound = {notes.stage: [each.edges for each in notes.rebindings] for notes in mesh.timeline.steps}
    edges = {"a": {"b": [("a->b",)]}, "b": {"a": [("a->b",)], "c": [("b->c",)]}, "c": {"b": [("b->c",)]}}
    assert {name: found for name, found in rebound.items() if found} == edges[stage]
    assert world.made[stage] == world.rows


def test_a_stage_resumes_from_its_last_checkpoint(chain: Pipeline) -> None:
    world = World(chain, checkpoints=True)
    mesh = _run(world, _kill("b", after_s=0.45))
    assert mesh.spoken == _SPOKEN
    assert world.made["b"] < 2 * world.rows - 2


def test_a_producer_without_its_first_chunk_restarts_too(chain: Pipeline) -> None:
    world = World(chain)
    world.keeps = False
    mesh = _run(world, _kill("c", after_s=0.45))
    assert mesh.spoken == _SPOKEN
    assert [len(mesh.attempts(stage)) for stage in chain.stages] == [2, 2, 2]


def test_a_broken_connection_costs_nothing(chain: Pipeline) -> None:
    async def fault(mesh: _Mesh) -> None:
        await asyncio.sleep(0.25)
        await mesh.of("b").sever(0.5)

    mesh = _run(World(chain), fault)
    assert mesh.spoken == _SPOKEN
    assert mesh.attempts("b") == [1]


def test_a_replica_that_remains_unreachable_is_replaced(chain: Pipeline) -> None:
    async def fault(mesh: _Mesh) -> None:
        await asyncio.sleep(0.25)
        await mesh.of("c").sever(30.0)

    mesh = _run(World(chain), fault)
    assert mesh.spoken == _SPOKEN
    assert mesh.attempts("c") == [1, 2]


def test_a_request_waits_for_the_only_replica(chain: Pipeline) -> None:
    mesh = _run(World(chain), _kill("b", after_s=0.25), replicas=1)
    assert mesh.spoken == _SPOKEN


@pytest.mark.parametrize("blow", [SimulatedReplica.die, lambda replica: asyncio.ensure_future(replica.sever(3.0))])
def test_a_new_request_waits_for_the_only_replica(chain: Pipeline, blow: Callable[[SimulatedReplica], object]) -> None:
    world = World(chain)

    async def main() -> dict[str, str]:
        async with _mesh(world, replicas=1) as mesh:
            blow(world.replicas["b-0"])
            await asyncio.sleep(0.5)
            assert not mesh.orchestrator.fleet.ready
            return await mesh.ask()

    assert virtual_time.run(main()) == _SPOKEN


def test_a_new_request_waits_for_a_replica_for_a_limited_time(chain: Pipeline) -> None:
    world = World(chain)

    async def main() -> float:
        async with _mesh(world, replicas=1) as mesh:
            severed = asyncio.create_task(world.replicas["b-0"].sever(1000.0))
            await asyncio.sleep(0.5)
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(UnavailableError, match="no replica of stage 'b' is ready") as error:
                await mesh.ask()
            severed.cancel()
            assert error.value.reason == "STAGE_NOT_READY"
            return asyncio.get_running_loop().time() - began_s

    assert STAGE_WAIT_S <= virtual_time.run(main()) < STAGE_WAIT_S + 1.0


def test_a_request_that_waits_for_a_replica_can_be_cancelled(chain: Pipeline) -> None:
    world = World(chain)

    async def main() -> None:
        async with _mesh(world, replicas=1) as mesh, asyncio.timeout(2.0):
            severed = asyncio.create_task(world.replicas["b-0"].sever(1000.0))
            await asyncio.sleep(0.5)
            asking = asyncio.create_task(mesh.ask())
            await asyncio.sleep(0.5)
            await mesh.orchestrator.cancel("r")
            with pytest.raises(CancelledRequestError):
                await asking
            severed.cancel()

    virtual_time.run(main())


@pytest.mark.parametrize(("choices", "rounds"), [(1, 40), (3, 15)])
def test_random_losses_do_not_change_the_outputs(tmp_path: Path, choices: int, rounds: int) -> None:
    for text in (CHAIN, _DIAMOND):
        pipeline = _pipeline(tmp_path, text)
        expected = _run(World(pipeline), _nothing, choices=choices).spoken
        assert len(expected) == choices * len(pipeline.outputs)
        for seed in range(rounds):
            rng = random.Random(seed)

            async def fault(mesh: _Mesh, rng: random.Random = rng) -> None:
                for _ in range(rng.randrange(1, 6)):
                    await asyncio.sleep(rng.random() * 0.5)
                    replica = rng.choice(list(mesh.world.replicas.values()))
                    mesh.world.keeps = rng.random() < 0.7
                    if rng.random() < 0.8:
                        replica.die()
                    else:
                        await replica.sever(rng.choice([0.3, 4.0]))

            world = World(pipeline, checkpoints=rng.random() < 0.5)
            spoken = _run(world, fault, replicas=3, choices=choices).spoken
            assert spoken == expected, f"seed {seed} of {pipeline.name}"


def test_a_dying_process_that_is_chosen_again_counts_as_one_death(chain: Pipeline) -> None:
    async def fault(mesh: _Mesh) -> None:
        await asyncio.sleep(0.25)
        mesh.of("b").fail()
        await asyncio.sleep(2.0)
        assert mesh.of("b").steps
        mesh.of("b").die()

    mesh = _run(World(chain), fault, replicas=1)
    assert mesh.spoken == _SPOKEN
    tried = [notes.error.reason for notes in mesh.timeline.steps if notes.stage == "b" and notes.error is not None]
    assert tried.count("ENGINE_DIED") > 1


def test_a_dying_process_that_is_chosen_alone_is_not_a_third_death(chain: Pipeline) -> None:
    async def fault(mesh: _Mesh) -> None:
        first = mesh.of("b")
        second = next(each for each in mesh.world.replicas.values() if each.member.stage == "b" and each is not first)
        await asyncio.sleep(0.25)
        first.die()
        while not second.steps:
            await asyncio.sleep(0.01)
        second.fail()

    mesh = _run(World(chain), fault)
    assert mesh.spoken == _SPOKEN
    tried = [(notes.replica, notes.error.reason) for notes in mesh.timeline.steps if notes.error is not None]
    assert tried.count((tried[-1][0], "ENGINE_DIED")) > 1


@pytest.mark.parametrize("choices", [1, 3])
def test_a_request_that_kills_its_replicas_fails_alone(chain: Pipeline, choices: int) -> None:
    world = World(chain)

    def kill(step: Step) -> None:
        if step.request.request_id.startswith("poison") and step.replica.member.stage == "b":
            asyncio.get_running_loop().call_soon(step.replica.die)

    world.on_row = kill

    async def main() -> None:
        async with _mesh(world, replicas=3) as mesh, asyncio.TaskGroup() as group:
            good = group.create_task(mesh.ask("good"))
            with pytest.raises(InternalError, match="the request is probably the cause") as error:
                await _Mesh(mesh.orchestrator, world, choices=choices).ask("poison")
            assert error.value.reason == "POISON_REQUEST"
            assert await good == _SPOKEN
            # Each choice may have killed two processes before one of them runs alone.
            assert 3 <= sum(replica.deaths for replica in world.replicas.values()) <= 2 * choices + 1

    virtual_time.run(main())


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


def test_a_request_without_outputs_restarts_in_a_new_generation(chain: Pipeline) -> None:
    world = World(chain)
    mesh = _run(world, partial(_upgrade, after_s=0.05), replicas=1)
    assert mesh.spoken == _SPOKEN
    assert len(mesh.generations) == 2
    assert mesh.generations[1] == "new-1"
    last = {notes.stage: notes.replica for notes in mesh.timeline.steps}
    assert last == {stage: f"{stage}-new" for stage in "abc"}
    (call,) = world.replicas["a-new"].calls
    assert call.attempt > max(call.attempt for call in world.replicas["a-0"].calls)
    assert not world.replicas["a-0"].steps


def test_a_request_with_outputs_fails_when_its_generation_ends(chain: Pipeline) -> None:
    async def main() -> float:
        async with _mesh(World(chain), replicas=1) as mesh:
            began_s = asyncio.get_running_loop().time()
            asking = asyncio.create_task(mesh.ask())
            await mesh.began.wait()
            await _upgrade(mesh, after_s=0.25)
            with pytest.raises(NotReadyError, match="of which stage 'b' has no replica left") as caught:
                await asking
            assert caught.value.reason == "GENERATION_ENDED"
            return asyncio.get_running_loop().time() - began_s

    assert virtual_time.run(main()) < 5


def test_all_choices_of_a_request_run_in_the_generation_whose_outputs_the_client_has(chain: Pipeline) -> None:
    async def main() -> None:
        async with _mesh(World(chain), replicas=1, choices=3) as mesh:
            _add_generation(mesh)
            await asyncio.sleep(0.1)
            for number in range(4):
                await mesh.ask(str(number), generation="new-1")
            steps = [notes for each in range(4) for notes in mesh.timeline_of(str(each)).steps]
            assert {notes.replica for notes in steps} == {"a-new", "b-new", "c-new"}
            with pytest.raises(NotReadyError, match="began in generation gone"):
                await mesh.ask("late", generation="gone")

    virtual_time.run(main())


def test_a_request_waits_for_its_generation_while_its_replica_may_return(chain: Pipeline) -> None:
    async def fault(mesh: _Mesh) -> None:
        _add_generation(mesh)
        await asyncio.sleep(0.25)
        mesh.of("b").die()

    mesh = _run(World(chain), fault, replicas=1)
    assert mesh.spoken == _SPOKEN
    assert {notes.replica for notes in mesh.timeline.steps} == {"a-0", "b-0", "c-0"}
