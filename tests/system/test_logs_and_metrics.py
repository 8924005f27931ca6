"""Logs and metrics of a running pipeline.

Logs are JSON with levels that operators change, and without prompts. Metrics agree with what clients receive.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagemesh.client import Text
from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke
from tests.deployment import Deployment, deployed, metric_value
from tests.system.pipelines import relays

PROMPT = "a prompt that nobody shall read"
PROCESSES = ("@orchestrator", "source-0", "relay-0", "frames-0")
CONNECTORS = {"source->relay": "shm", "relay->frames": "nixl"}
"""The connectors of the edges. The orchestrator sends its input over grpc."""
_RUN = "stagemesh.services.stage.step.run"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGEMESH_HOME", str(folder / "home"))
        patch.setenv("STAGEMESH_LOG_FORMAT", "json")
        chosen = [f"edges.{number}.connector={connector}" for number, connector in enumerate(CONNECTORS.values())]
        options = ["--metrics", *(part for each in chosen for part in ("--set", each))]
        with deployed(relays(folder, steps=20, step_s=0.01), *options) as running:
            yield running


def _set(running: Deployment, *arguments: str) -> Ran:
    return invoke("admin", "log-level", *arguments, "--server", running.admin_endpoint)


def _records(running: Deployment, request_id: str) -> list[dict[str, Any]]:
    """Runs a request, and returns the log records that name it."""
    with running.client() as client:
        client.generate(PROMPT, seed=1, request_id=request_id).result()
    records = [json.loads(json.loads(line)["text"]) for line in invoke("logs", "--json").stdout.splitlines()]
    assert records
    return [record for record in records if record.get("request_id") == request_id]


def test_the_level_changes_while_processes_run(running: Deployment) -> None:
    assert _records(running, "quiet") == []
    assert _set(running, "debug").stdout.splitlines() == [f"{process}: debug, was info" for process in PROCESSES]
    records = _records(running, "loud")
    assert {record["level"] for record in records} == {"DEBUG"}
    steps = [record for record in records if record["logger"] == _RUN]
    assert {(record["stage"], record["replica"], record["attempt"]) for record in steps} == {
        (stage, f"{stage}-0", "1") for stage in ("source", "relay", "frames")
    }
    assert "debug" in _set(running, "info").stdout
    assert _records(running, "quiet-again") == []


def test_logs_contain_no_prompt(running: Deployment) -> None:
    _set(running, "debug")
    assert _records(running, "private")
    _set(running, "info")
    logs = invoke("logs").stdout
    assert "private" in logs
    assert PROMPT not in logs


def test_only_a_target_and_a_logger_change(running: Deployment) -> None:
    ran = _set(running, "debug", "--on", "relay", "--logger", "stagemesh.services.stage.step")
    assert ran.stdout.splitlines() == ["relay-0: debug, was info"]
    assert {(record["replica"], record["logger"]) for record in _records(running, "one")} == {("relay-0", _RUN)}
    assert _set(running, "info", "--on", "@orchestrator").stdout.splitlines() == ["@orchestrator: info, was info"]
    _set(running, "info", "--on", "relay-0", "--logger", "stagemesh.services.stage.step")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["debug", "--on", "nobody"], ExitCode.NOT_FOUND, "unknown replica or stage 'nobody'"),
        (["loud"], ExitCode.USAGE, "'loud' is not one of"),
    ],
)
def test_a_wrong_target_and_a_wrong_level(running: Deployment, arguments: list[str], code: int, message: str) -> None:
    _set(running, *arguments).check(code, message)


def test_a_process_without_the_logger_is_named(running: Deployment) -> None:
    ran = _set(running, "debug", "--logger", "stagemesh.services.stage.step.run")
    assert ran.exit_code == ExitCode.FAILED
    first, *others = ran.stdout.splitlines()
    assert first.startswith("@orchestrator: failed: this process has no logger")
    assert ["debug, was" in line for line in others] == [True] * 3
    _set(running, "info", "--logger", "stagemesh.services.stage.step.run")


def test_the_level_of_a_process_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_LOG_LEVEL", "loud")
    ran = invoke("up", str(relays(tmp_path)))
    assert ran.exit_code != 0
    assert "STAGEMESH_LOG_LEVEL is 'loud'; it must be DEBUG or INFO or WARNING or ERROR" in ran.stderr


# -- metrics


def _count_sent(running: Deployment, edge: str) -> tuple[float, float]:
    """Returns the numbers of bytes and chunks that a replica counts for an edge."""
    metrics, labels = running.scrape(f"{edge.partition('->')[0]}-0"), {"edge": edge, "connector": CONNECTORS[edge]}
    size_bytes = metric_value(metrics, "stagemesh_sent_bytes_total", **labels)
    return size_bytes, metric_value(metrics, "stagemesh_chunk_transfer_seconds_count", **labels)


def test_a_replica_counts_what_it_sends(running: Deployment) -> None:
    before = {edge: _count_sent(running, edge) for edge in CONNECTORS}
    with running.client() as client:
        results = [client.generate("hello").result() for _ in range(3)]
    for name, (size_bytes, chunks) in before.items():
        usages = [edge for result in results for edge in result.finished.edges if edge.edge == name]
        assert all(edge.size_bytes > 0 and edge.chunks > 0 for edge in usages)
        sent = sum(edge.size_bytes for edge in usages), sum(edge.chunks for edge in usages)
        assert _count_sent(running, name) == (size_bytes + sent[0], chunks + sent[1])


@pytest.mark.parametrize("edge", CONNECTORS)
def test_a_replica_names_itself_in_each_metric(running: Deployment, edge: str) -> None:
    stage = edge.partition("->")[0]
    metrics, labels = running.scrape(f"{stage}-0"), {"edge": edge, "connector": CONNECTORS[edge]}
    assert metric_value(metrics, "stagemesh_chunk_transfer_seconds_sum", **labels) > 0
    assert metric_value(metrics, "stagemesh_resent_chunks_total", **labels) == 0
    assert metric_value(metrics, "stagemesh_arena_bytes") > 0
    assert metric_value(metrics, "process_resident_memory_bytes") > 0
    samples = [each for metric in metrics.values() for each in metric.samples]
    assert all((each.labels["stage"], each.labels["replica"]) == (stage, f"{stage}-0") for each in samples)


def test_the_flows_of_a_running_request_are_shown(running: Deployment) -> None:
    with running.client() as client:
        events = iter(client.generate("hello"))
        next(event for event in events if isinstance(event, Text))
        metrics = running.scrape("source-0")
        assert metric_value(metrics, "stagemesh_flows", edge="source->relay") == 1
        assert metric_value(metrics, "stagemesh_flow_credit_bytes", edge="source->relay") > 0
        assert metric_value(metrics, "stagemesh_engine_running_requests") == 1
        assert list(events)
    assert metric_value(running.scrape("source-0"), "stagemesh_flows") == 0


def test_the_orchestrator_serves_its_metrics_too(running: Deployment) -> None:
    assert metric_value(running.scrape("orchestrator"), "stagemesh_ready") == 1
