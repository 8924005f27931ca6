"""The metrics of an orchestrator, compared with what clients have received, and its signals for autoscalers."""

import asyncio
import math
import re
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from stagemesh.client import AsyncResponseStream, AudioChunk, EdgeUsage
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.metrics.prometheus import SCALING_METRICS, OrchestratorMetrics
from stagemesh.orchestrator.orchestrator import Orchestrator as Core
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.v1 import request_pb2, stage_pb2
from tests.deployment import metric_value
from tests.orchestrator.mesh import load, poll
from tests.orchestrator.running_pipeline import Orchestrator, running_pipeline

PIPELINE = """\
pipeline: measured
stages:
  source: {{engine: fake, function: source, options: {{steps: 6, step_s: 0.02, size_bytes: 30000}}}}
  relay: {{engine: fake, function: relay{replicas}}}
edges: [{{from: source, to: relay, connector: {connector}}}]
outputs: {{text: source, relayed: relay}}
"""


async def _scrape(orchestrator: Orchestrator) -> dict[str, Metric]:
    def read() -> str:
        with urllib.request.urlopen(f"http://{orchestrator.metrics_endpoint}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    return {metric.name: metric for metric in text_string_to_metric_families(await asyncio.to_thread(read))}


def _has_unfinished(metrics: dict[str, Metric]) -> bool:
    """Returns whether a request has failed or was cancelled."""
    return any(metric_value(metrics, "stagemesh_requests_total", outcome=each) > 0 for each in ("failed", "cancelled"))


@pytest.mark.parametrize("connector", ["shm", "grpc", "nixl"])
async def test_bytes_and_seconds_are_those_of_the_clients(tmp_path: Path, connector: str) -> None:
    text = PIPELINE.format(connector=connector, replicas="")
    sent: list[EdgeUsage] = []
    tokens = least_s = most_s = 0.0
    async with running_pipeline(tmp_path, text) as (orchestrator,):
        for _ in range(5):
            began_s = time.monotonic()
            result = await orchestrator.client.generate("hello").result()
            most_s += time.monotonic() - began_s
            assert result.finished.timings is not None
            least_s += result.finished.timings.finished_s
            sent += [edge for report in result.finished.stages.values() for edge in report.edges]
            tokens += sum(report.usage.output_tokens for report in result.finished.stages.values())
        metrics = await _scrape(orchestrator)
    assert metric_value(metrics, "stagemesh_requests_total", outcome="finished") == 5
    edge = "source->relay"
    assert metric_value(metrics, "stagemesh_edge_bytes_total", edge=edge) == sum(each.size_bytes for each in sent) > 0
    assert metric_value(metrics, "stagemesh_edge_chunks_total", edge=edge) == sum(each.chunks for each in sent) > 0
    assert metric_value(metrics, "stagemesh_edge_links", edge=edge, connector=connector) == 1
    assert metric_value(metrics, "stagemesh_stage_output_tokens_total") == tokens
    seconds = metric_value(metrics, "stagemesh_request_seconds_sum")
    assert 0.99 * least_s <= seconds <= most_s
    assert metric_value(metrics, "stagemesh_request_seconds_count") == 5
    assert metric_value(metrics, "stagemesh_request_queue_seconds_count") == 5
    assert metric_value(metrics, "stagemesh_stage_step_seconds_count", stage="source") == 5
    assert 0 < metric_value(metrics, "stagemesh_request_first_output_seconds_sum") < seconds
    assert math.isclose(metric_value(metrics, "stagemesh_replicas", state="ready"), 2)


SPEAKING = """\
pipeline: speaking
stages:
  source: {engine: fake, function: source, options: {steps: 6, step_s: 0.15, size_bytes: 30}}
  frames: {engine: fake, function: frames}
  sound: {engine: fake, function: sound}
edges: [{from: source, to: frames}, {from: frames, to: sound}]
outputs: {text: source, audio: sound}
"""


async def test_underruns_are_those_of_the_clients(tmp_path: Path) -> None:
    longest, total = list[float](), 0.0
    async with running_pipeline(tmp_path, SPEAKING, processes={"sound-0"}) as (orchestrator,):
        for _ in range(3):
            waits = [wait async for wait in _waits(orchestrator.client.generate("hello"))]
            longest.append(max(waits))
            total += sum(waits)
        metrics = await _scrape(orchestrator)
    assert total > 3 * 0.3, "the stage is too slow for its listeners"
    seconds = metric_value(metrics, "stagemesh_stage_audio_underrun_seconds_total", stage="sound")
    assert math.isclose(seconds, total, rel_tol=0.2)
    name = "stagemesh_stage_audio_longest_underrun_seconds"
    assert metric_value(metrics, f"{name}_count", stage="sound") == 3
    assert metric_value(metrics, f"{name}_bucket", stage="sound", le="0.05") == 0
    assert math.isclose(metric_value(metrics, f"{name}_sum", stage="sound"), sum(longest), rel_tol=0.2)


async def _waits(response_stream: AsyncResponseStream) -> AsyncIterator[float]:
    """Yields the seconds for which a listener who plays the audio as it arrives waits for each further part."""
    dry_s = None
    async for event in response_stream:
        if isinstance(event, AudioChunk):
            now_s = time.monotonic()
            if dry_s is not None:
                yield max(0.0, now_s - dry_s)
            dry_s = max(now_s, dry_s or now_s) + event.duration_s


async def test_recoveries_and_errors_have_their_causes(tmp_path: Path) -> None:
    text = PIPELINE.format(connector="grpc", replicas=", replicas: 2").replace("step_s: 0.02", "step_s: 0.1")
    killable = ("relay-0", "relay-1")
    async with running_pipeline(tmp_path, text, replicas={"relay": 2}, processes=killable) as (orchestrator,):
        running = asyncio.create_task(orchestrator.client.generate("hello").result())
        name = await _working_replica(orchestrator)
        orchestrator.replicas[name].kill()
        await running
        with pytest.raises(StagemeshError) as caught:
            await orchestrator.client.generate("hello", timeout_s=0.3).result()
        metrics = await poll(lambda: _scrape(orchestrator), until=_has_unfinished, timeout_s=60)
    assert metric_value(metrics, "stagemesh_stage_recoveries_total", stage="relay") >= 1
    reasons = {
        each.labels["reason"]
        for each in metrics["stagemesh_stage_recoveries"].samples
        if each.name.endswith("_total") and each.value
    }
    assert reasons <= {"REPLICA_LOST", "PRODUCER_LOST", "CONSUMER_LOST", "REPLICA_RESTARTED", "UPSTREAM_LOST"}, reasons
    assert caught.value.code.name == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("audio_s", [-1.0, math.nan, math.inf])
async def test_a_number_that_a_stage_invents_is_not_counted(tmp_path: Path, audio_s: float) -> None:
    pipeline = load(tmp_path, PIPELINE.format(connector="grpc", replicas=""))
    observed = Core(pipeline, Fleet(pipeline, ()), max_request_s=60, drain_s=0)
    metrics, timeline = OrchestratorMetrics(observed), Timeline("r")
    step = timeline.begin("source", replica="source-0", attempt=1)
    step.note_finished(stage_pb2.StepFinished(usage=request_pb2.Usage(audio_s=audio_s, output_tokens=3)))
    timeline.end(None)
    for observe in observed.on_ended:
        observe(timeline)
    counted = {each.name: each.samples for each in metrics.collect()}
    assert not counted["stagemesh_stage_audio_seconds"]
    assert counted["stagemesh_stage_output_tokens"][0].value == 3


async def test_each_metric_has_help_and_a_conventional_name(tmp_path: Path) -> None:
    text = PIPELINE.format(connector="grpc", replicas="")
    async with running_pipeline(tmp_path, text) as (orchestrator,):
        await orchestrator.client.generate("hello").result()
        metrics = await _scrape(orchestrator)
    own = [metric for name, metric in metrics.items() if name.startswith("stagemesh_")]
    assert len(own) > 20
    assert "process_resident_memory_bytes" in metrics
    for metric in own:
        assert metric.documentation.endswith(".")
        assert re.fullmatch(r"stagemesh(_[a-z]+)+", metric.name)
        assert {label for each in metric.samples for label in each.labels} <= {
            *("stage", "replica", "state", "edge", "connector", "outcome", "reason", "le")
        }


async def _working_replica(orchestrator: Orchestrator) -> str:
    """Returns the name of a replica of the stage `relay` that runs a step."""
    while True:
        for each in (await _scrape(orchestrator))["stagemesh_replica_running_steps"].samples:
            name = each.labels["replica"]
            if name.startswith("relay") and each.value:
                return name
        await asyncio.sleep(0.02)


# A request takes 100 s, and runs alone. Two requests are admitted at the same time.
SLOW = """
pipeline: slow
stages: {say: {engine: fake, function: source, options: {steps: 100, step_s: 1, max_running: 1}}}
outputs: {text: say}
limits: {max_in_flight: 2}
"""
QUEUED = "stagemesh_stage_queued_seconds"


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncGenerator[Orchestrator]:
    async with running_pipeline(tmp_path, SLOW) as (orchestrator,):
        yield orchestrator


async def _signals(orchestrator: Orchestrator) -> dict[str, float]:
    """Returns the signals that autoscalers read from Prometheus."""
    metrics = await _scrape(orchestrator)
    samples = [sample for name in SCALING_METRICS for sample in metrics[name].samples]
    return {sample.name: sample.value for sample in samples if sample.labels["stage"] == "say"}


async def test_the_waiting_work_grows_with_the_backlog_and_is_zero_without_one(slow: Orchestrator) -> None:
    async with slow.requests(1):
        assert (await slow.until_stage("say", lambda stage: stage.running == 1)).queued_s == 0
        async with slow.requests(1):
            first = await slow.until_stage("say", lambda stage: stage.queued == 1)
            # These requests wait for admission.
            async with slow.requests(3):
                more = await slow.until_stage("say", lambda stage: stage.queued_s > 2 * first.queued_s)
                read = (await _signals(slow))[QUEUED]
    assert [first.queued_s, more.queued_s] == pytest.approx([100, 400], rel=0.1)
    assert read == pytest.approx(more.queued_s, rel=0.1)
    assert (await slow.until_stage("say", lambda stage: stage.running == 0)).queued_s == 0


async def test_prometheus_reads_the_signals_of_operators(slow: Orchestrator) -> None:
    async with slow.requests(5):
        stage = await slow.until_stage("say", lambda stage: stage.queued == 1)
        gauges = await _signals(slow)
    assert gauges == {
        QUEUED: pytest.approx(stage.queued_s, rel=0.1),
        "stagemesh_stage_playout_at_risk": 0,
        "stagemesh_stage_in_flight": 2,
    }
    await slow.until_stage("say", lambda stage: stage.running == 0)
    assert set((await _signals(slow)).values()) == {0}


async def test_the_metrics_of_several_orchestrators_add_up(tmp_path: Path) -> None:
    async with running_pipeline(tmp_path, SLOW, orchestrators=2) as (one, other), one.requests(2), other.requests(1):
        for each in (one, other):
            await each.until_stage("say", lambda stage: stage.queued == 2)
        gauges = [await _signals(each) for each in (one, other)]
    assert [each[QUEUED] for each in gauges] == pytest.approx([133, 67], rel=0.1)
    assert [each["stagemesh_stage_in_flight"] for each in gauges] == [2, 1]
