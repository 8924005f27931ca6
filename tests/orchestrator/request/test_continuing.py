"""Requests that continue at another orchestrator with the steps that the first one has started, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.simulation import virtual_time
from stagemesh.common.errors import InvalidRequestError
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import Member
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.validation import validate
from stagemesh.v1 import orchestrator_pb2
from tests.orchestrator.mesh import ask, load
from tests.orchestrator.simulated_replicas import Members, World

SPOKEN = {"first": "a0é a1é a2é a3é a4é ", "last": "c0é c1é c2é c3é c4é "}
ROWS = 5


class Caller:
    """A caller of one orchestrator, and what it receives."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.calling: asyncio.Task[None] | None = None
        self.replicas: Mapping[str, str] = {}
        self.spoken: dict[str, str] = {}

    async def call(self, request: orchestrator_pb2.GenerateRequest) -> None:
        """Runs a request until it ends."""
        async with aclosing(await self.orchestrator.generate(request, time_left_s=60.0)) as events:
            async for data in events:
                event = orchestrator_pb2.GenerateResponse.FromString(data)
                if event.HasField("admitted"):
                    self.replicas = dict(event.admitted.choices[0].replicas)
                elif event.HasField("output"):
                    name = event.output.name
                    self.spoken[name] = self.spoken.get(name, "") + event.output.text

    @property
    def attempts(self) -> set[int]:
        """The attempts with which the orchestrator ran the request."""
        timeline = self.orchestrator.history.find("r")
        assert timeline is not None
        return {notes.attempt for notes in timeline.steps}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(load(tmp_path))


@asynccontextmanager
async def _orchestrating(world: World) -> AsyncGenerator[Orchestrator]:
    """Runs an orchestrator over the replicas of the world, which several orchestrators share."""
    clock = asyncio.get_running_loop().time

    def connect(member: Member) -> ReplicaClient:
        known = world.replicas.get(member.name)
        return world.connect(member) if known is None else known  # type: ignore[return-value]

    fleet = Fleet(world.pipeline, [Members(world.pipeline, 2)], connect=connect, clock=clock)
    orchestrator = Orchestrator(world.pipeline, fleet, max_request_s=60.0, drain_s=60.0, clock=clock)
    async with fleet.watched(), orchestrator.running():
        await asyncio.sleep(0.5)
        yield orchestrator


def _run(world: World, between: Callable[[Caller], Coroutine[object, object, None]]) -> Caller:
    """Calls one orchestrator and, 0.25 s later and after `between`, another one with the same request.

    Returns the second caller. `between` receives the first one, whose call continues together with the second one.
    """

    async def main() -> Caller:
        async with AsyncExitStack() as stack:
            first, second = [Caller(await stack.enter_async_context(_orchestrating(world))) for _ in range(2)]
            first.calling = asyncio.create_task(first.call(ask(request_id="r")))
            await asyncio.sleep(0.25)
            again = ask(request_id="r")
            again.earlier_calls, again.admitted_call = 1, 0
            again.parameters.seed = 0
            again.preferred_replicas.update(first.replicas)
            async with asyncio.TaskGroup() as group:
                group.create_task(second.call(again))
                group.create_task(between(first))
            first.calling.cancel()
            await asyncio.wait([first.calling])
        return second

    return virtual_time.run(main())


async def _nothing(first: Caller) -> None:
    del first


def test_running_steps_continue_at_another_orchestrator(world: World) -> None:
    second = _run(world, _nothing)
    assert second.spoken == SPOKEN
    assert second.attempts == {1}
    assert world.made == {"a": ROWS, "b": ROWS, "c": ROWS}, "no stage computes a row twice"


def test_an_orchestrator_that_the_client_has_left_spares_the_steps(world: World) -> None:
    async def leave(first: Caller) -> None:
        await asyncio.sleep(0.1)
        await first.orchestrator.cancel("r", when_left=True, may_act_for=lambda _: True)
        assert first.calling is not None
        first.calling.cancel()

    second = _run(world, leave)
    assert second.spoken == SPOKEN
    assert second.attempts == {1}
    assert world.made == {"a": ROWS, "b": ROWS, "c": ROWS}, "no stage computes a row twice"


def test_a_request_runs_again_if_the_other_orchestrator_cancels_its_steps(world: World) -> None:
    async def cancel(first: Caller) -> None:
        await asyncio.sleep(0.1)
        await first.orchestrator.cancel("r", when_left=False, may_act_for=lambda _: True)

    second = _run(world, cancel)
    assert second.spoken == SPOKEN
    assert max(second.attempts) > 1000


def test_a_request_runs_again_if_a_replica_has_restarted(world: World) -> None:
    async def restart(first: Caller) -> None:
        world.replicas[first.replicas["b"]].die()

    second = _run(world, restart)
    assert second.spoken == SPOKEN


def test_a_request_runs_again_if_its_replicas_are_unknown(world: World) -> None:
    async def main() -> Caller:
        async with _orchestrating(world) as orchestrator:
            again = ask(request_id="r")
            again.earlier_calls, again.admitted_call = 1, 0
            again.preferred_replicas["a"] = "gone-0"
            caller = Caller(orchestrator)
            await caller.call(again)
        return caller

    caller = virtual_time.run(main())
    assert caller.spoken == SPOKEN
    assert caller.attempts == {1001}


def test_the_admitted_call_is_an_earlier_one(world: World) -> None:
    request = ask(request_id="r")
    request.admitted_call = request.earlier_calls = 3
    with pytest.raises(InvalidRequestError, match="admitted_call is 3; it must be lower than earlier_calls"):
        validate(request, world.pipeline)
    request.parameters.choices = 2
    with pytest.raises(InvalidRequestError, match="admitted_call is 3"):
        validate(request, world.pipeline)
