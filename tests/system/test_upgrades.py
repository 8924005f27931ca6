"""Rolling updates and stops of orchestrators under load, as real processes, in the way of Kubernetes: the new processes
start while the former ones run, and each former one ends when its successor is ready.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stagemesh.client import Result
from tests.system.breakable_relay import BreakableRelay, breakable_relay
from tests.system.pipelines import pipeline_file
from tests.system.upgrades import ORCHESTRATOR_HEALTH, Processes, RunningProcess, Version, pick_addresses, traffic

_STEPS = 10
_OLD_BYTES, _NEW_BYTES = 16, 32
_LOADING_S = 3.0
"""The time that the slowest new stage needs to load."""

_OLD = f"""
pipeline: upgraded
stages:
  first: {{engine: fake, function: source, options: {{step_s: 0.05, size_bytes: {_OLD_BYTES}}}}}
  last: {{engine: fake, function: relay, options: {{size_bytes: {_OLD_BYTES}}}}}
edges: [{{from: first, to: last}}]
outputs: {{start: first, end: last}}
"""
_SAME_TOPOLOGY = f"""
pipeline: upgraded
stages:
  first: {{engine: fake, function: source, options: {{step_s: 0.05, size_bytes: {_NEW_BYTES}}}}}
  last: {{engine: fake, function: relay, options: {{size_bytes: {_NEW_BYTES}, start_s: {_LOADING_S}}}}}
edges: [{{from: first, to: last}}]
outputs: {{start: first, end: last}}
"""
_OTHER_TOPOLOGY = f"""
pipeline: upgraded
stages:
  first: {{engine: fake, function: source, options: {{step_s: 0.05, size_bytes: {_NEW_BYTES}}}}}
  middle: {{engine: fake, function: relay, options: {{start_s: {_LOADING_S}}}}}
  last: {{engine: fake, function: relay, options: {{size_bytes: {_NEW_BYTES}}}}}
edges: [{{from: first, to: middle}}, {{from: middle, to: last}}]
outputs: {{start: first, end: last}}
"""


def _bytes_per_step(result: Result) -> int:
    """Returns the size that all stages of a request gave to a text. Fails if the stages gave it different sizes."""
    start, end = len(result.texts["start"]), len(result.texts["end"])
    assert start == end, "the request ran in two generations"
    return start // _STEPS


def _write(folder: Path, name: str, text: str, *, generation: str) -> Version:
    return Version(pipeline_file(folder, text, name=name), generation, f"{generation.partition('-')[0]}-*")


@asynccontextmanager
async def _processes(folder: Path) -> AsyncIterator[Processes]:
    made = Processes(folder, pick_addresses("first", "middle", "last"))
    try:
        yield made
    finally:
        await made.end()


async def _replace_stage(former: RunningProcess | None, new: RunningProcess, *, stage: str) -> None:
    await new.until_serving(stage)
    if former is not None:
        await former.terminate()


async def _replace_orchestrator(former: RunningProcess, new: RunningProcess, service: BreakableRelay) -> None:
    await new.until_serving(ORCHESTRATOR_HEALTH)
    service.targets[:] = [new.endpoint]
    await former.terminate()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("text", "generation"), [(_SAME_TOPOLOGY, "same-2"), (_OTHER_TOPOLOGY, "other-2")], ids=["compatible", "other"]
)
async def test_a_rolling_update_fails_no_request_and_mixes_nothing(tmp_path: Path, text: str, generation: str) -> None:
    old = _write(tmp_path, "old", _OLD, generation="same-1")
    new = _write(tmp_path, "new", text, generation=generation)
    async with _processes(tmp_path) as processes:
        former = {stage: await processes.start_stage(old, stage, 0) for stage in ("first", "last")}
        orchestrator = await processes.start_orchestrator(old)
        await orchestrator.until_serving(ORCHESTRATOR_HEALTH)
        with breakable_relay(orchestrator.endpoint) as service:
            async with traffic(service.endpoint, steps=_STEPS) as load:
                await load.until_more(4)
                loading_s = time.monotonic()
                stages = [stage for stage in processes.addresses if stage in text]
                started = {stage: await processes.start_stage(new, stage, 1) for stage in stages}
                next_orchestrator = await processes.start_orchestrator(new)
                async with asyncio.TaskGroup() as group:
                    group.create_task(_replace_orchestrator(orchestrator, next_orchestrator, service))
                    for stage, replica in started.items():
                        group.create_task(_replace_stage(former.get(stage), replica, stage=stage))
                await load.until_more(4)
        assert min(each.terminated_s for each in former.values()) - loading_s >= _LOADING_S
    assert set(map(_bytes_per_step, load.results)) == {_OLD_BYTES, _NEW_BYTES}
    assert [_bytes_per_step(each) for each in load.results[-4:]] == [_NEW_BYTES] * 4


@pytest.mark.timeout(180)
@pytest.mark.parametrize("drain_s", [20.0, 0.1], ids=["requests finish", "requests move"])
async def test_an_orchestrator_at_a_shared_address_stops_unnoticed(tmp_path: Path, drain_s: float) -> None:
    version = _write(tmp_path, "old", _OLD, generation="same-1")
    async with _processes(tmp_path) as processes:
        for stage in ("first", "last"):
            await processes.start_stage(version, stage, 0)
        both = [await processes.start_orchestrator(version, drain_s=drain_s) for _ in range(2)]
        for each in both:
            await each.until_serving(ORCHESTRATOR_HEALTH)
        with breakable_relay(*(each.endpoint for each in both)) as service:
            async with traffic(service.endpoint, steps=_STEPS) as load:
                await load.until_more(4)
                # The address leads to the former orchestrator for a while, as in a cluster.
                async with asyncio.TaskGroup() as group:
                    group.create_task(both[0].terminate())
                    await load.until_more(2)
                    service.targets.remove(both[0].endpoint)
                await load.until_more(4)


@pytest.mark.timeout(180)
async def test_a_stage_is_replaced_while_its_only_replica_receives_requests(tmp_path: Path) -> None:
    version = _write(tmp_path, "old", _OLD, generation="same-1")
    async with _processes(tmp_path) as processes:
        replicas = {stage: await processes.start_stage(version, stage, 0) for stage in ("first", "last")}
        orchestrator = await processes.start_orchestrator(version)
        await orchestrator.until_serving(ORCHESTRATOR_HEALTH)
        async with traffic(orchestrator.endpoint, steps=_STEPS) as load:
            for number in (1, 0, 1):
                await load.until_more(2)
                for stage, former in replicas.items():
                    new = await processes.start_stage(version, stage, number)
                    await _replace_stage(former, new, stage=stage)
                    replicas[stage] = new
            await load.until_more(4)
            assert {_bytes_per_step(each) for each in load.results} == {_OLD_BYTES}
