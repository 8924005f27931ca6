"""The reference of metrics, generated from the metrics that each kind of process registers."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.fake_engine import signature
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.gateway.service import Metrics as GatewayMetrics
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.metrics.prometheus import OrchestratorMetrics
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.pipeline import load_pipeline
from stagemesh.services.engines.calls import EngineCalls
from stagemesh.services.stage.metrics import ReplicaMetrics
from stagemesh.services.stage.runtime import StageRuntime
from tools.docs_site.tables import escape, make_table

_HEAD = """\
# Metrics

The metrics of each kind of process, generated from the code. [Operations](../operations.md#metrics) says where they are
served and which of them matter. A histogram has the samples `NAME_bucket`, with the label `le`, `NAME_sum` and
`NAME_count`. Each process also serves the `process_*` metrics of its own process.

"""
_REPLICA = (
    "The samples of a replica also have the labels `stage` and `replica`. A vllm stage adds vLLM's metrics, `vllm:*`."
)


class MetricDescription(NamedTuple):
    """A metric: the name of its samples, or of the histogram, its type, its labels and its help text."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def describe_metrics() -> dict[str, list[MetricDescription]]:
    """Returns the metrics of an orchestrator, of a replica and of a gateway, by the kind of the process."""
    return {
        "Orchestrator": asyncio.run(_orchestrator_metrics()),
        "Replica": asyncio.run(_replica_metrics()),
        "Gateway": _gateway_metrics(),
    }


def render_metrics() -> str:
    """Returns all metrics as a Markdown document."""
    lines: list[str] = []
    for process, metrics in describe_metrics().items():
        rows = [
            (f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), escape(each.text))
            for each in metrics
        ]
        lines += [f"## {process}", "", *([_REPLICA, ""] if process == "Replica" else [])]
        lines += make_table(("metric", "type", "labels", "meaning"), rows)
    return _HEAD + "\n".join(lines)


async def _orchestrator_metrics() -> list[MetricDescription]:
    pipeline = load_pipeline("speech", check_models=False)
    orchestrator = Orchestrator(pipeline, Fleet(pipeline, ()), max_request_s=60, drain_s=0)
    metrics = OrchestratorMetrics(orchestrator)
    return list(_descriptions(metrics.collect(), _labels_of(metrics)))


async def _replica_metrics() -> list[MetricDescription]:
    config = StageConfig(
        pipeline="reference",
        generation="1",
        stage="source",
        replica="source-0",
        engine="fake",
        listen="127.0.0.1:0",
        function="source",
    )
    plane = DataPlane(replica=config.replica, pipeline=config.pipeline, generation=config.generation)
    runtime = StageRuntime(FakeEngine(config), plane, config, signature("source"))
    try:
        await runtime.start()
        return list(_descriptions([*ReplicaMetrics(runtime).collect(), *EngineCalls().metrics()], {}))
    finally:
        await runtime.close()


def _gateway_metrics() -> list[MetricDescription]:
    registry = CollectorRegistry()

    async def app(*_: object) -> None: ...

    labels = _labels_of(GatewayMetrics(app, registry))
    return [each for each in _descriptions(registry.collect(), labels) if each.name.startswith("stagemesh_")]


def _labels_of(owner: object) -> dict[str, tuple[str, ...]]:
    """Returns the labels of the counters, gauges and histograms that an object has as attributes, by their names."""
    values = list(vars(owner).values())
    for each in values:
        if isinstance(each, dict):
            values.extend(cast("dict[str, object]", each).values())
    found = [value for value in values if isinstance(value, MetricWrapperBase)]
    return {family.name: _label_names(metric) for metric in found for family in metric.describe()}


def _descriptions(families: Iterable[Metric], labels: dict[str, tuple[str, ...]]) -> Iterator[MetricDescription]:
    for family in sorted(families, key=lambda each: each.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        known = labels.get(family.name) or _label_names(family)
        yield MetricDescription(name, family.type, known, family.documentation)


def _label_names(metric: Any) -> tuple[str, ...]:
    # The samples contain the labels, but a metric without samples reports its labels in no other way.
    return tuple(getattr(metric, "_labelnames", ()))
