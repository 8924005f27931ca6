"""Several processes die at the same time, and again before the request has recovered, in virtual time."""

import asyncio
import itertools
import random
from collections.abc import Collection
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from benchmarks.simulation import virtual_time
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.output_record import NOT_RUNNING
from stagemesh.v1 import orchestrator_pb2
from tests.orchestrator.mesh import DIAMOND, ask, load
from tests.orchestrator.simulated_replicas import START_S, Members, World

_STAGES = ("top", "left", "right", "join")
_ORCHESTRATORS = ("first", "second")
_CLIENT = "client"
"""The client's connection."""
_SEVERED = " is severed"
_LONGEST_S = 20.0
_PHASES_S = [0.06 * number for number in range(12)]


class _Orchestrator:
    """A process of an orchestrator, which restarts some time after its death."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stack = AsyncExitStack()
        self.running: Orchestrator | None = None

    async def start(self) -> None:
        clock = asyncio.get_running_loop().time
        pipeline = self._world.pipeline
        fleet = Fleet(
            pipeline, [Members(pipeline, self._world.replicas_of_each)], connect=self._world.connect, clock=clock
        )
        orchestrator = Orchestrator(pipeline, fleet, max_request_s=60.0, drain_s=0.0, clock=clock)
        await self._stack.enter_async_context(fleet.watched())
        await self._stack.enter_async_context(orchestrator.running())
        self.running = orchestrator

    async def die(self) -> None:
        """Kills the process: nothing of it is left but the steps that run at replicas. It restarts after START_S."""
        if self.running is None:
            return
        self.running = None
        await self._stack.aclose()
        await asyncio.sleep(START_S)
        await self.start()

    async def close(self) -> None:
        self.running = None
        await self._stack.aclose()


class _Client:
    """Calls the orchestrators until the request has ended, as the clients of Stagemesh do."""

    def __init__(self, orchestrators: Collection[_Orchestrator]) -> None:
        self._orchestrators = itertools.cycle(orchestrators)
        self.spoken: dict[str, str] = {}
        self.admitted = asyncio.Event()
        self._replicas: dict[str, str] = {}
        self._calls = 0
        self.is_cut = False
        """Whether the present call breaks with the next event."""
        self._admitted_call: int | None = None

    async def ask(self) -> dict[str, str]:
        while True:
            orchestrator = next(self._orchestrators).running
            if orchestrator is None:
                await asyncio.sleep(0.05)
                continue
            try:
                await self._call(orchestrator)
            except StagemeshError as exc:
                if not isinstance(exc, UnavailableError) or exc.reason != NOT_RUNNING:
                    raise
                self._calls += 1
            else:
                return self.spoken

    async def _call(self, orchestrator: Orchestrator) -> None:
        positions = [
            orchestrator_pb2.OutputPosition(name=name, position=len(text.encode()))
            for name, text in self.spoken.items()
        ]
        request = ask(
            request_id="r", earlier_calls=self._calls, parameters={"seed": 0}, next_positions=positions, linger_s=30
        )
        if self._admitted_call is not None:
            request.admitted_call = self._admitted_call
            request.preferred_replicas.update(self._replicas)
        async with aclosing(await orchestrator.generate(request, time_left_s=60.0)) as events:
            async for data in events:
                if self.is_cut:
                    self.is_cut = False
                    raise UnavailableError("the connection broke", reason=NOT_RUNNING)
                event = orchestrator_pb2.GenerateResponse.FromString(data)
                if event.HasField("admitted"):
                    self._replicas = dict(event.admitted.choices[0].replicas)
                    self._admitted_call = self._calls
                    self.admitted.set()
                elif event.HasField("output"):
                    known = self.spoken.get(event.output.name, "")
                    assert event.output.position == len(known.encode()), "each part begins where the previous one ended"
                    self.spoken[event.output.name] = known + event.output.text


async def _ask(world: World, blows: Collection[tuple[float, Collection[str]]]) -> tuple[dict[str, str], float]:
    """Runs a request, and kills processes, each time these together and this time after the blow before.

    Returns the outputs, and the time from the last blow to the end.
    """
    loop = asyncio.get_running_loop()
    orchestrators = {name: _Orchestrator(world) for name in _ORCHESTRATORS}
    async with AsyncExitStack() as stack:
        for each in orchestrators.values():
            await each.start()
            stack.push_async_callback(each.close)
        await asyncio.sleep(0.5)
        client = _Client(orchestrators.values())
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(client.ask())
            await client.admitted.wait()
            last_s = loop.time()
            for after_s, names in blows:
                await asyncio.sleep(after_s)
                last_s = loop.time()
                for name in names:
                    if name == _CLIENT:
                        client.is_cut = True
                    elif name in orchestrators:
                        group.create_task(orchestrators[name].die())
                    elif name.endswith(_SEVERED):
                        group.create_task(world.replicas[name.removesuffix(_SEVERED)].sever(1.5))
                    else:
                        world.replicas[name if "-" in name else f"{name}-0"].die()
            spoken = await asking
        return spoken, loop.time() - last_s


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_all_pairs_and_triples_of_processes_may_die_together(tmp_path: Path, size: int, checkpoints: bool) -> None:
    pipeline = load(tmp_path, DIAMOND)
    undisturbed, _ = virtual_time.run(_ask(World(pipeline), ()))
    for names in itertools.combinations((*_ORCHESTRATORS, *_STAGES), size):
        for phase_s in _PHASES_S:
            world = World(pipeline, checkpoints=checkpoints)
            spoken, took_s = virtual_time.run(_ask(world, [(phase_s, names)]))
            assert (names, phase_s, spoken) == (names, phase_s, undisturbed)
            assert took_s < _LONGEST_S, (names, phase_s)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_processes_may_die_again_before_the_request_has_recovered(tmp_path: Path, seed: int, faulty: bool) -> None:
    pipeline = load(tmp_path, DIAMOND)
    undisturbed, _ = virtual_time.run(_ask(World(pipeline), ()))
    rng = random.Random(seed)
    for number in range(25):
        world = World(pipeline, checkpoints=rng.random() < 0.5)
        world.keeps = rng.random() < 0.7
        world.faults = rng if faulty else None
        # With several replicas, a severed one that is taken for lost may be attached to again, and waits for its peers.
        world.replicas_of_each = rng.choice([1, 1, 1 if faulty else 3])
        blows = list[tuple[float, Collection[str]]]()
        # A request whose stage dies three times on other replicas is taken for the cause.
        for _ in range(rng.randrange(2, 5 if world.replicas_of_each == 1 else 3)):
            replicas = [f"{stage}-{rng.randrange(world.replicas_of_each)}" for stage in _STAGES]
            victims = (*_ORCHESTRATORS, *replicas, *([_CLIENT, f"{replicas[0]}{_SEVERED}"] if faulty else []))
            blows.append((rng.random() * rng.choice([0.2, 2.0]), rng.sample(victims, rng.randrange(1, 5))))
        spoken, took_s = virtual_time.run(_ask(world, blows))
        assert (number, blows, spoken) == (number, blows, undisturbed)
        assert took_s < _LONGEST_S, (number, blows)


def test_only_the_lost_stage_restarts_at_another_orchestrator(tmp_path: Path) -> None:
    world = World(load(tmp_path, DIAMOND))
    virtual_time.run(_ask(world, [(0.3, ("first", "join"))]))
    assert world.made["join"] > world.rows
    assert [world.made[stage] for stage in ("top", "left", "right")] == [world.rows] * 3
