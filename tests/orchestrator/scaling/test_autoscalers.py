"""What autoscalers read from an orchestrator: KEDA by gRPC, and Prometheus by HTTP. The stages are processes."""

import asyncio
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.keda import externalscaler_pb2
from stagemesh.keda.externalscaler_pb2_grpc import ExternalScalerStub
from stagemesh.orchestrator.scaling.external_scaler import parse_trigger
from stagemesh.orchestrator.scaling.signals import Metric
from stagemesh.orchestrator.spec import Pipeline, load_pipeline
from tests.orchestrator.admin.calls import error_of
from tests.orchestrator.mesh import CHAIN
from tests.orchestrator.scaling.processes import Orchestrator, running_pipeline

# A request takes 1 s, and runs alone. Two requests are admitted at the same time.
SLOW = """
pipeline: slow
stages: {say: {engine: fake, function: source, options: {steps: 10, step_s: 0.1, max_running: 1}}}
outputs: {text: say}
limits: {max_in_flight: 2}
"""
QUEUED = {"stage": "say", "queuedSeconds": "1"}


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncGenerator[Orchestrator]:
    async with running_pipeline(tmp_path, SLOW) as (orchestrator,):
        yield orchestrator


def _scaled(**metadata: str) -> externalscaler_pb2.ScaledObjectRef:
    return externalscaler_pb2.ScaledObjectRef(name="say", namespace="test", scalerMetadata=metadata)


async def _value(orchestrator: Orchestrator, metric: Metric, metadata: Mapping[str, str]) -> float:
    request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=_scaled(**metadata), metricName=metric.value)
    answer = await ExternalScalerStub(orchestrator.admin).GetMetrics(request, timeout=10)
    (value,) = answer.metricValues
    assert value.metricName == metric.value
    return value.metricValueFloat


def _scrape(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8")


async def _gauges(orchestrator: Orchestrator) -> dict[str, float]:
    text = await asyncio.to_thread(_scrape, orchestrator.metrics_endpoint)
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def test_the_waiting_work_grows_with_the_backlog_and_is_zero_without_one(slow: Orchestrator) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(slow.run(1))
        assert (await slow.until_stage("say", lambda stage: stage.running == 1)).queued_s == 0
        group.create_task(slow.run(1))
        first = await slow.until_stage("say", lambda stage: stage.queued_s > 0)
        group.create_task(slow.run(3))
        more = await slow.until_stage("say", lambda stage: stage.queued_s > first.queued_s + 1)
        assert await _value(slow, Metric.QUEUED, QUEUED) == pytest.approx(more.queued_s, abs=1.0)
    idle = await slow.until_stage("say", lambda stage: stage.running == 0)
    assert (idle.queued, idle.queued_s) == (0, 0)


async def test_keda_and_prometheus_read_the_same_signals_as_operators(slow: Orchestrator) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(slow.run(5))
        stage = await slow.until_stage("say", lambda stage: stage.running + stage.queued == 2)
        read = await _value(slow, Metric.QUEUED, QUEUED)
        gauges = await _gauges(slow)
        assert not running.done()
    assert read == pytest.approx(stage.queued_s, abs=1.0)
    assert gauges['stagemesh_stage_queued_seconds{stage="say"}'] == pytest.approx(read, abs=1.0)
    assert gauges['stagemesh_stage_in_flight{stage="say"}'] == 2
    assert gauges['stagemesh_stage_playout_at_risk{stage="say"}'] == 0
    assert (await _gauges(slow))['stagemesh_stage_queued_seconds{stage="say"}'] == 0


async def test_requests_that_wait_for_admission_count_for_each_orchestrator(slow: Orchestrator) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(slow.run(5))
        await slow.until_stage("say", lambda stage: stage.queued == 1)
        one, three = await asyncio.gather(
            _value(slow, Metric.QUEUED, QUEUED), _value(slow, Metric.QUEUED, {**QUEUED, "orchestrators": "3"})
        )
    # Three of the five requests wait for admission. They are three quarters of the four that wait.
    assert 1.5 < three / one < 3


async def test_keda_learns_when_a_stage_becomes_active(slow: Orchestrator) -> None:
    scaler = ExternalScalerStub(slow.admin)
    activity = aiter(scaler.StreamIsActive(_scaled(**QUEUED), timeout=20))
    assert not (await anext(activity)).result
    async with asyncio.TaskGroup() as group:
        group.create_task(slow.run(2))
        assert (await anext(activity)).result
        assert (await scaler.IsActive(_scaled(**QUEUED), timeout=10)).result
    assert not (await anext(activity)).result
    assert not (await scaler.IsActive(_scaled(**QUEUED), timeout=10)).result


async def test_keda_receives_the_targets_that_are_on(slow: Orchestrator) -> None:
    scaler = ExternalScalerStub(slow.admin)
    metadata = {**QUEUED, "queuedSeconds": "2.5", "playoutAtRisk": "0", "inFlight": "8", "scalerAddress": "admin:7781"}
    answer = await scaler.GetMetricSpec(_scaled(**metadata), timeout=10)
    assert {spec.metricName: spec.targetSizeFloat for spec in answer.metricSpecs} == {
        "stagemesh_stage_queued_seconds": 2.5,
        "stagemesh_stage_in_flight": 8.0,
    }


async def test_an_invalid_trigger_fails_every_call_and_names_the_entry(slow: Orchestrator) -> None:
    scaler, wrong = ExternalScalerStub(slow.admin), _scaled(stage="sing", queuedSeconds="1")
    request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=wrong, metricName=Metric.QUEUED.value)
    unknown = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=_scaled(**QUEUED), metricName="work")
    errors = [
        await error_of(scaler.IsActive(wrong, timeout=10)),
        await error_of(anext(aiter(scaler.StreamIsActive(wrong, timeout=10)))),
        await error_of(scaler.GetMetricSpec(wrong, timeout=10)),
        await error_of(scaler.GetMetrics(request, timeout=10)),
        await error_of(scaler.GetMetrics(unknown, timeout=10)),
    ]
    assert [(error.code.name, error.reason) for error in errors] == [("INVALID_ARGUMENT", "INVALID_OPTION")] * 5
    assert [error.metadata["option"] for error in errors] == ["stage"] * 4 + ["metricName"]


@pytest.fixture
def chain(tmp_path: Path) -> Pipeline:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return load_pipeline(str(tmp_path / "chain.yaml"))


@pytest.mark.parametrize(
    ("metadata", "option", "message"),
    [
        ({}, "stage", "stage of the trigger's metadata is ''; stages: a, b, c"),
        ({"stage": "z"}, "stage", "is 'z'"),
        ({"stage": "a"}, "queuedSeconds", "is 0 or missing"),
        ({"stage": "a", "queuedSeconds": "0", "playoutAtRisk": "0"}, "queuedSeconds", "is 0 or missing"),
        ({"stage": "a", "queuedSeconds": "5s"}, "queuedSeconds", "is '5s'; it must be a number of at least 0"),
        ({"stage": "a", "queuedSeconds": "-1"}, "queuedSeconds", "at least 0"),
        ({"stage": "a", "queuedSeconds": "inf"}, "queuedSeconds", "at least 0"),
        ({"stage": "a", "queuedSeconds": "nan"}, "queuedSeconds", "at least 0"),
        ({"stage": "a", "playoutAtRisk": ""}, "playoutAtRisk", "is ''"),
        ({"stage": "a", "queuedSeconds": "1", "orchestrators": "0"}, "orchestrators", "a whole number"),
        ({"stage": "a", "queuedSeconds": "1", "orchestrators": "1.5"}, "orchestrators", "a whole number"),
        ({"stage": "a", "queuedSecond": "1"}, "queuedSecond", "is unknown; entries: stage, queuedSeconds"),
    ],
)
def test_an_invalid_entry_is_named(chain: Pipeline, metadata: Mapping[str, str], option: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="trigger's metadata") as caught:
        parse_trigger(metadata, chain)
    assert (caught.value.reason, caught.value.metadata) == ("INVALID_OPTION", {"option": option})
    assert message in caught.value.message
