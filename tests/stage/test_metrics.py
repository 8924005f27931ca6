"""The metrics of a replica, compared with what clients receive."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.client import EdgeUsage
from tests.deployment import Deployment, deployed, metric_value
from tests.system.pipelines import relays

CONNECTORS = {"source->relay": "shm", "relay->frames": "nixl"}
"""The connectors of the edges. The orchestrator sends its input by grpc."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    pipeline = relays(tmp_path_factory.mktemp("metrics"), steps=20, step_s=0.01)
    chosen = [f"edges.{number}.connector={connector}" for number, connector in enumerate(CONNECTORS.values())]
    with deployed(pipeline, "--metrics", *(part for each in chosen for part in ("--set", each))) as running:
        yield running


def test_a_replica_counts_what_it_sends(running: Deployment) -> None:
    sent: dict[str, list[EdgeUsage]] = {}
    with running.client() as client:
        for _ in range(3):
            for edge in client.generate("hello").result().finished.edges:
                sent.setdefault(edge.edge, []).append(edge)
    assert sent.keys() == CONNECTORS.keys()
    for name, usages in sent.items():
        stage = name.partition("->")[0]
        metrics, labels = running.scrape(f"{stage}-0"), {"edge": name, "connector": CONNECTORS[name]}
        assert (
            metric_value(metrics, "stagemesh_sent_bytes_total", **labels) == sum(each.size_bytes for each in usages) > 0
        )
        chunks = sum(each.chunks for each in usages)
        assert metric_value(metrics, "stagemesh_chunk_transfer_seconds_count", **labels) == chunks > 0
        assert metric_value(metrics, "stagemesh_chunk_transfer_seconds_sum", **labels) > 0
        assert metric_value(metrics, "stagemesh_resent_chunks_total", **labels) == 0
        assert metric_value(metrics, "stagemesh_arena_bytes") > 0
        assert metric_value(metrics, "process_resident_memory_bytes") > 0
        samples = [each for metric in metrics.values() for each in metric.samples]
        assert all((each.labels["stage"], each.labels["replica"]) == (stage, f"{stage}-0") for each in samples)


INPUT_PIPELINE = """
pipeline: heard
stages: {speak: {engine: fake, function: relay}}
edges: [{from: "@input", to: speak}]
outputs: {audio: speak}
"""


def test_an_orchestrator_counts_the_input_that_it_sends(tmp_path: Path) -> None:
    (tmp_path / "heard.yaml").write_text(INPUT_PIPELINE)
    pieces = ("one ", "two ", "three")
    with deployed(tmp_path / "heard.yaml", "--metrics") as running, running.client() as client:
        with client.converse(input_mode="stream") as session:
            for piece in pieces:
                session.append(piece)
            session.commit()
            assert list(session.answer())
        metrics = running.scrape("orchestrator")
        labels = {"edge": "@input->speak", "connector": "grpc"}
        assert metric_value(metrics, "stagemesh_sent_bytes_total", **labels) == len("".join(pieces))
        chunks = metric_value(metrics, "stagemesh_chunk_transfer_seconds_count", **labels)
        assert chunks == metric_value(metrics, "stagemesh_edge_chunks_total", edge="@input->speak") > 0
        assert metric_value(metrics, "stagemesh_chunk_transfer_seconds_sum", **labels) > 0


def test_the_flows_of_a_running_request_are_shown(running: Deployment) -> None:
    with running.client() as client:
        events = iter(client.generate("hello"))
        next(event for event in events if type(event).__name__ == "Text")
        metrics = running.scrape("source-0")
        assert metric_value(metrics, "stagemesh_flows", edge="source->relay") == 1
        assert metric_value(metrics, "stagemesh_flow_credit_bytes", edge="source->relay") > 0
        assert metric_value(metrics, "stagemesh_engine_running_requests") == 1
        assert list(events)
    assert metric_value(running.scrape("source-0"), "stagemesh_flows") == 0


def test_the_orchestrator_serves_its_metrics_too(running: Deployment) -> None:
    assert metric_value(running.scrape("orchestrator"), "stagemesh_ready") == 1
