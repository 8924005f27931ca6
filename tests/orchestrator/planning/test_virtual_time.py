"""The simulation runs the orchestrator's own code, and an hour of virtual time takes a moment."""

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.simulation import virtual_time
from benchmarks.simulation.replicas import CHUNK_S
from benchmarks.simulation.round_robin import RoundRobin
from benchmarks.simulation.run import LARGE_CHUNKS, SMALL_CHUNKS, Load, latencies_s, survival
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas
from stagemesh.orchestrator.planning.planner import LeastWork
from stagemesh.pipeline import Pipeline
from tests.orchestrator.mesh import CHAIN, load
from tests.orchestrator.replicas import ready_replica


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return load(tmp_path, CHAIN + "limits: {max_in_flight: 100000}\n")


def test_time_jumps_to_the_next_timer() -> None:
    async def wait() -> list[float]:
        loop = asyncio.get_running_loop()
        return [await asyncio.sleep(3600, result=loop.time()), loop.time()]

    began_s = time.monotonic()
    assert virtual_time.run(wait()) == pytest.approx([0, 3600])
    assert time.monotonic() - began_s < 10


def test_waiting_without_a_timer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no timer is set"):
        virtual_time.run(asyncio.Event().wait())


def test_round_robin_returns_none_if_all_replicas_are_avoided(pipeline: Pipeline) -> None:
    ready, replicas = ReadyReplicas(), [ready_replica(f"b-{number}", pipeline) for number in range(2)]
    for replica in replicas:
        ready.add(replica)
    choice = RoundRobin()
    assert choice.choose(ready, avoid=replicas) is None
    assert [choice.choose(ready, avoid=replicas[:1]) for _ in range(3)] == [replicas[1]] * 3


@pytest.mark.parametrize("choice", [None, RoundRobin()], ids=["planned", "round robin"])
def test_requests_run_through_the_orchestrator_and_take_their_time(
    pipeline: Pipeline, choice: LeastWork | None
) -> None:
    load = Load(requests=40, utilization=0.5, seed=1)
    taken_s = virtual_time.run(latencies_s(pipeline, replicas=6, load=load, choice=choice))
    assert len(taken_s) == 30
    assert min(taken_s) > 2.9 * SMALL_CHUNKS * CHUNK_S
    assert max(taken_s) > LARGE_CHUNKS * CHUNK_S


def test_requests_survive_replicas_that_die_at_random(pipeline: Pipeline) -> None:
    load = Load(requests=150, utilization=0.5, seed=1)
    found = virtual_time.run(survival(pipeline, replicas=12, load=load, lifetime_s=60.0))
    assert found.deaths > 3
    assert found.lost_steps > 3
    assert found.resume_s
    assert [str(error) for error in found.failures] == []
    assert max(found.resume_s) < 5
