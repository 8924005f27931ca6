"""Autoscalers read the signals of the orchestrators from Prometheus, which reads them over HTTP."""

import asyncio
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from stagemesh.orchestrator.metrics.scaling import Metric
from tests.orchestrator.running_pipeline import Orchestrator, running_pipeline

# A request takes 100 s, and runs alone. Two requests are admitted at the same time.
SLOW = """
pipeline: slow
stages: {say: {engine: fake, function: source, options: {steps: 100, step_s: 1, max_running: 1}}}
outputs: {text: say}
limits: {max_in_flight: 2}
"""
QUEUED = 'stagemesh_stage_queued_seconds{stage="say"}'


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncGenerator[Orchestrator]:
    async with running_pipeline(tmp_path, SLOW) as (orchestrator,):
        yield orchestrator


def _scrape(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8")


async def _gauges(orchestrator: Orchestrator) -> dict[str, float]:
    """Returns the signals that Prometheus reads."""
    text = await asyncio.to_thread(_scrape, orchestrator.metrics_endpoint)
    signals = tuple(f"{metric.value}{{" for metric in Metric)
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(signals)]
    return {name: float(value) for name, _, value in lines}


async def test_the_waiting_work_grows_with_the_backlog_and_is_zero_without_one(slow: Orchestrator) -> None:
    async with slow.requests(1):
        assert (await slow.until_stage("say", lambda stage: stage.running == 1)).queued_s == 0
        async with slow.requests(1):
            first = await slow.until_stage("say", lambda stage: stage.queued == 1)
            # These requests wait for admission.
            async with slow.requests(3):
                more = await slow.until_stage("say", lambda stage: stage.queued_s > 2 * first.queued_s)
                read = (await _gauges(slow))[QUEUED]
    assert [first.queued_s, more.queued_s] == pytest.approx([100, 400], rel=0.1)
    assert read == pytest.approx(more.queued_s, rel=0.1)
    assert (await slow.until_stage("say", lambda stage: stage.running == 0)).queued_s == 0


async def test_prometheus_reads_the_signals_of_operators(slow: Orchestrator) -> None:
    async with slow.requests(5):
        stage = await slow.until_stage("say", lambda stage: stage.queued == 1)
        gauges = await _gauges(slow)
    assert gauges == {
        QUEUED: pytest.approx(stage.queued_s, rel=0.1),
        'stagemesh_stage_playout_at_risk{stage="say"}': 0,
        'stagemesh_stage_in_flight{stage="say"}': 2,
    }
    await slow.until_stage("say", lambda stage: stage.running == 0)
    assert set((await _gauges(slow)).values()) == {0}


async def test_the_metrics_of_several_orchestrators_add_up(tmp_path: Path) -> None:
    async with running_pipeline(tmp_path, SLOW, orchestrators=2) as (one, other), one.requests(2), other.requests(1):
        for each in (one, other):
            await each.until_stage("say", lambda stage: stage.queued == 2)
        gauges = [await _gauges(each) for each in (one, other)]
    assert [each[QUEUED] for each in gauges] == pytest.approx([133, 67], rel=0.1)
    assert [each['stagemesh_stage_in_flight{stage="say"}'] for each in gauges] == [2, 1]
