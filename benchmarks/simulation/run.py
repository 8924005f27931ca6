"""Runs an orchestrator with simulated replicas and with requests that arrive at random times, of very uneven sizes."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from benchmarks.simulation.replicas import CHUNK_S, Members, World
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.planning.planner import LeastWork
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2

SMALL_CHUNKS, LARGE_CHUNKS, LARGE_SHARE = 1, 20, 0.1
MEAN_S = CHUNK_S * (SMALL_CHUNKS * (1 - LARGE_SHARE) + LARGE_CHUNKS * LARGE_SHARE)
_FOREVER_S = 1e6


@dataclass(frozen=True)
class Load:
    """A number of requests, and the fraction of the replicas' capacity that they use."""

    requests: int
    utilization: float
    seed: int


@asynccontextmanager
async def orchestrated(
    pipeline: Pipeline, *, replicas: int, choice: LeastWork | None = None
) -> AsyncGenerator[tuple[Orchestrator, World]]:
    """Yields an orchestrator whose replicas are all ready."""
    world = World(pipeline)
    members = Members(pipeline, replicas)
    fleet = Fleet(pipeline, [members], connect=world.connect, clock=asyncio.get_running_loop().time)
    orchestrator = Orchestrator(pipeline, fleet, max_request_s=_FOREVER_S, drain_s=_FOREVER_S, choice=choice)
    async with fleet.watched(), orchestrator.running():
        # Replicas report at once that they are ready. Some report their load within this time, others later.
        await asyncio.sleep(1.0)
        assert fleet.ready, "simulated replicas are always ready"
        yield orchestrator, world


async def latencies_s(pipeline: Pipeline, *, replicas: int, load: Load, choice: LeastWork | None = None) -> list[float]:
    """Returns the latency of each request, without those that arrived before the load was steady."""
    choice = choice or _choice(load)
    async with orchestrated(pipeline, replicas=replicas, choice=choice) as (orchestrator, world):
        answers = await _arrivals(orchestrator, world, load)
    return [answer.taken_s for answer in answers[load.requests // 4 :]]


@dataclass(frozen=True)
class Survival:
    """The outcomes of requests whose replicas died."""

    deaths: int
    lost_steps: int
    """The number of steps that ran on a replica when it died. Those that were still needed restarted elsewhere."""
    resume_s: Sequence[float]
    """The time from the loss of each of these steps to its restart."""
    failures: Sequence[StagemeshError]
    taken_s: Sequence[float]
    """The latency of each request."""


async def survival(pipeline: Pipeline, *, replicas: int, load: Load, lifetime_s: float) -> Survival:
    """Runs requests on replicas that die at random times, after `lifetime_s` on average."""
    async with orchestrated(pipeline, replicas=replicas, choice=_choice(load)) as (orchestrator, world):
        killing = asyncio.create_task(_kill(world, replicas / lifetime_s, random.Random(f"deaths {load.seed}")))
        answers = await _arrivals(orchestrator, world, load)
        killing.cancel()
    return Survival(
        deaths=world.deaths,
        lost_steps=world.lost_steps,
        resume_s=world.resume_s,
        failures=[answer.error for answer in answers if answer.error is not None],
        taken_s=[answer.taken_s for answer in answers],
    )


@dataclass(frozen=True)
class _Answer:
    taken_s: float
    error: StagemeshError | None


def _choice(load: Load) -> LeastWork:
    """Returns the orchestrator's choice of replicas with a seed of its own, so that runs are reproducible."""
    return LeastWork(random.Random(f"choice {load.seed}"))


async def _kill(world: World, per_s: float, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.expovariate(per_s))
        victim = rng.choice(world.replicas)
        if victim.alive:
            victim.die()


async def _arrivals(orchestrator: Orchestrator, world: World, load: Load) -> list[_Answer]:
    rng = random.Random(load.seed)
    per_stage = len(world.replicas) // len(world.pipeline.stages)
    pause_s = MEAN_S / per_stage / load.utilization
    async with asyncio.TaskGroup() as group:
        asking: list[asyncio.Task[_Answer]] = []
        for number in range(load.requests):
            world.chunks[str(number)] = LARGE_CHUNKS if rng.random() < LARGE_SHARE else SMALL_CHUNKS
            asking.append(group.create_task(_ask(orchestrator, world, str(number))))
            await asyncio.sleep(rng.expovariate(1 / pause_s))
    return [task.result() for task in asking]


async def _ask(orchestrator: Orchestrator, world: World, request_id: str) -> _Answer:
    loop = asyncio.get_running_loop()
    began_s, error = loop.time(), None
    request = orchestrator_pb2.GenerateRequest(request_id=request_id)
    request.input.text = "work"
    try:
        async with aclosing(await orchestrator.generate(request, time_left_s=None)) as events:
            async for _ in events:
                pass
    except StagemeshError as exc:
        error = exc
    world.forget(request_id)
    return _Answer(loop.time() - began_s, error)
