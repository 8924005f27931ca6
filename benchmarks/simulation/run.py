"""An orchestrator over simulated replicas, and requests that arrive as they do: at random, and of very uneven sizes."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from benchmarks.simulation.stages import CHUNK_S, Members, World
from stagemesh.orchestrator.choice import Choice
from stagemesh.orchestrator.fleet import Fleet
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.v1 import orchestrator_pb2

SMALL_CHUNKS, LARGE_CHUNKS, LARGE_SHARE = 1, 20, 0.1
MEAN_S = CHUNK_S * (SMALL_CHUNKS * (1 - LARGE_SHARE) + LARGE_CHUNKS * LARGE_SHARE)
_FOREVER_S = 1e6


@dataclass(frozen=True)
class Load:
    """So many requests, at a share of what the replicas can do."""

    requests: int
    utilization: float
    seed: int


@asynccontextmanager
async def orchestrated(
    pipeline: Pipeline, *, replicas: int, choice: Choice | None = None
) -> AsyncGenerator[tuple[Orchestrator, World]]:
    """An orchestrator whose replicas are all ready."""
    world = World(pipeline)
    members = Members(pipeline, replicas)
    fleet = Fleet(pipeline, [members], connect=world.connect, clock=asyncio.get_running_loop().time)
    orchestrator = Orchestrator(pipeline, fleet, max_request_s=_FOREVER_S, drain_s=_FOREVER_S, choice=choice)
    async with fleet.watched(), orchestrator.running():
        # Replicas say that they are ready at once; some report their load within that time, some later.
        await asyncio.sleep(1.0)
        assert fleet.ready, "nothing keeps a simulated replica from being ready"
        yield orchestrator, world


async def latencies_s(pipeline: Pipeline, *, replicas: int, load: Load, choice: Choice | None = None) -> list[float]:
    """How long each request takes, those left out that came before the replicas were as busy as they get."""
    rng = random.Random(load.seed)
    per_stage = replicas // len(pipeline.stages)
    pause_s = MEAN_S / per_stage / load.utilization
    taken_s = [0.0] * load.requests
    async with (
        orchestrated(pipeline, replicas=replicas, choice=choice) as (orchestrator, world),
        asyncio.TaskGroup() as group,
    ):
        for number in range(load.requests):
            world.chunks[str(number)] = LARGE_CHUNKS if rng.random() < LARGE_SHARE else SMALL_CHUNKS
            group.create_task(_ask(orchestrator, world, number, taken_s))
            await asyncio.sleep(rng.expovariate(1 / pause_s))
    return taken_s[load.requests // 4 :]


async def _ask(orchestrator: Orchestrator, world: World, number: int, taken_s: list[float]) -> None:
    loop = asyncio.get_running_loop()
    began_s, request_id = loop.time(), str(number)
    request = orchestrator_pb2.GenerateRequest(request_id=request_id)
    request.input.text = "work"
    async with aclosing(orchestrator.generate(request, time_left_s=None)) as events:
        async for _ in events:
            pass
    taken_s[number] = loop.time() - began_s
    world.forget(request_id)
