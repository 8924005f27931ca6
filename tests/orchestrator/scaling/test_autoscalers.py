"""Autoscalers read the signals of an orchestrator: KEDA by gRPC, and Prometheus by HTTP."""

import asyncio
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.keda import externalscaler_pb2
from stagemesh.keda.externalscaler_pb2_grpc import ExternalScalerStub
from stagemesh.orchestrator.metrics.external_scaler import parse_trigger
from stagemesh.orchestrator.metrics.scaling import Metric
from stagemesh.pipeline import Pipeline, load_pipeline
from tests.orchestrator.admin.calls import error_of
from tests.orchestrator.mesh import CHAIN, mesh
from tests.orchestrator.scaling.processes import Orchestrator, running_pipeline

pytestmark = pytest.mark.timeout(240)  # on a busy machine, processes take long to start

# A request takes 100 s, and runs alone. Two requests are admitted at the same time.
SLOW = """
pipeline: slow
stages: {say: {engine: fake, function: source, options: {steps: 100, step_s: 1, max_running: 1}}}
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
            async with slow.requests(3):
                more = await slow.until_stage("say", lambda stage: stage.queued_s > 2 * first.queued_s)
                read = await _value(slow, Metric.QUEUED, QUEUED)
    assert [first.queued_s, more.queued_s] == pytest.approx([100, 400], rel=0.1)
    assert read == pytest.approx(more.queued_s, rel=0.1)
    assert (await slow.until_stage("say", lambda stage: stage.running == 0)).queued_s == 0


async def test_prometheus_reads_the_signals_of_operators(slow: Orchestrator) -> None:
    async with slow.requests(5):
        stage = await slow.until_stage("say", lambda stage: stage.queued == 1)
        gauges = await _gauges(slow)
    assert gauges == {
        'stagemesh_stage_queued_seconds{stage="say"}': pytest.approx(stage.queued_s, rel=0.1),
        'stagemesh_stage_playout_at_risk{stage="say"}': 0,
        'stagemesh_stage_in_flight{stage="say"}': 2,
    }
    await slow.until_stage("say", lambda stage: stage.running == 0)
    assert set((await _gauges(slow)).values()) == {0}


async def test_requests_that_wait_for_admission_count_for_each_orchestrator(slow: Orchestrator) -> None:
    async with slow.requests(5):
        await slow.until_stage("say", lambda stage: stage.queued == 1)
        one = await _value(slow, Metric.QUEUED, QUEUED)
        three = await _value(slow, Metric.QUEUED, {**QUEUED, "orchestrators": "3"})
    # One request waits at the replica, and three wait for admission.
    assert [one, three] == pytest.approx([400, 1000], rel=0.1)


async def test_the_metrics_of_several_orchestrators_add_up(tmp_path: Path) -> None:
    async with running_pipeline(tmp_path, SLOW, orchestrators=2) as (one, other), one.requests(2), other.requests(1):
        for each in (one, other):
            await each.until_stage("say", lambda stage: stage.queued == 2)
        gauges = [await _gauges(each) for each in (one, other)]
    queued = [each['stagemesh_stage_queued_seconds{stage="say"}'] for each in gauges]
    assert queued == pytest.approx([133, 67], rel=0.1)
    assert [each['stagemesh_stage_in_flight{stage="say"}'] for each in gauges] == [2, 1]


async def test_keda_learns_when_a_stage_becomes_active(slow: Orchestrator) -> None:
    scaler = ExternalScalerStub(slow.admin)
    activity = aiter(scaler.StreamIsActive(_scaled(**QUEUED), timeout=20))
    assert not (await anext(activity)).result
    async with slow.requests(1):
        assert (await anext(activity)).result
        assert (await scaler.IsActive(_scaled(**QUEUED), timeout=10)).result
    assert not (await anext(activity)).result
    assert not (await scaler.IsActive(_scaled(**QUEUED), timeout=10)).result


async def test_keda_receives_the_targets_that_are_on(tmp_path: Path) -> None:
    metadata = {"stage": "a", "queuedSeconds": "2.5", "playoutAtRisk": "0", "inFlight": "8", "scalerAddress": "h:7781"}
    async with mesh(tmp_path) as up:
        answer = await ExternalScalerStub(up.admin).GetMetricSpec(_scaled(**metadata), timeout=10)
    assert {spec.metricName: spec.targetSizeFloat for spec in answer.metricSpecs} == {
        "stagemesh_stage_queued_seconds": 2.5,
        "stagemesh_stage_in_flight": 8.0,
    }


async def test_an_invalid_trigger_fails_every_call_and_names_the_entry(tmp_path: Path) -> None:
    wrong = _scaled(stage="z", queuedSeconds="1")
    request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=wrong, metricName=Metric.QUEUED.value)
    valid = _scaled(stage="a", queuedSeconds="1")
    unknown = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=valid, metricName="work")
    async with mesh(tmp_path) as up:
        scaler = ExternalScalerStub(up.admin)
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
