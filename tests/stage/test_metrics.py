"""The metrics of a replica, compared with what clients receive."""

import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from stagemesh.client import EdgeUsage
from tests.deployment import Deployment, deployed
from tests.system.pipelines import relays


@pytest.fixture(scope="module", params=["shm", "nixl", "grpc"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    pipeline = relays(tmp_path_factory.mktemp("metrics"), steps=20, step_s=0.01)
    with deployed(pipeline, "--metrics", "--set", f"edges.*.connector={request.param}") as running:
        yield running


def _scrape(running: Deployment, name: str) -> dict[str, Metric]:
    endpoint = next(each["metrics_endpoints"][name] for each in running.history if each.get("event") == "ready")
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        return {metric.name: metric for metric in text_string_to_metric_families(answer.read().decode())}


def _value(metrics: dict[str, Metric], sample: str, **labels: str) -> float:
    """Returns the value of a sample, or 0 if it does not exist."""
    samples = (each for metric in metrics.values() for each in metric.samples if each.name == sample)
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_a_replica_counts_what_it_sends(running: Deployment, request: pytest.FixtureRequest) -> None:
    connector = request.node.callspec.params["running"]
    sent: dict[str, list[EdgeUsage]] = {}
    with running.client() as client:
        for _ in range(3):
            for edge in client.generate("hello").result().finished.edges:
                sent.setdefault(edge.edge, []).append(edge)
    assert len(sent) == 2
    for name, usages in sent.items():
        stage = name.partition("->")[0]
        metrics, labels = _scrape(running, f"{stage}-0"), {"edge": name, "connector": connector}
        assert _value(metrics, "stagemesh_sent_bytes_total", **labels) == sum(each.size_bytes for each in usages) > 0
        chunks = sum(each.chunks for each in usages)
        assert _value(metrics, "stagemesh_chunk_transfer_seconds_count", **labels) == chunks > 0
        assert _value(metrics, "stagemesh_chunk_transfer_seconds_sum", **labels) > 0
        assert _value(metrics, "stagemesh_resent_chunks_total", **labels) == 0
        assert _value(metrics, "stagemesh_arena_bytes") > 0
        assert _value(metrics, "process_resident_memory_bytes") > 0
        samples = [each for metric in metrics.values() for each in metric.samples]
        assert all((each.labels["stage"], each.labels["replica"]) == (stage, f"{stage}-0") for each in samples)


def test_the_flows_of_a_running_request_are_shown(running: Deployment) -> None:
    with running.client() as client:
        events = iter(client.generate("hello"))
        next(event for event in events if type(event).__name__ == "Text")
        metrics = _scrape(running, "source-0")
        assert _value(metrics, "stagemesh_flows", edge="source->relay") == 1
        assert _value(metrics, "stagemesh_flow_credit_bytes", edge="source->relay") > 0
        assert _value(metrics, "stagemesh_engine_running_requests") == 1
        assert list(events)
    assert _value(_scrape(running, "source-0"), "stagemesh_flows") == 0


def test_the_orchestrator_serves_its_metrics_too(running: Deployment) -> None:
    assert _value(_scrape(running, "orchestrator"), "stagemesh_ready") == 1
