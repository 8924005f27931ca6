"""Monitors, alerts, dashboards, traces and the test of the release."""

import asyncio
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric as Family

from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.metrics.prometheus import OrchestratorMetrics
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.pipeline import load_pipeline
from stagemesh.services.engines.calls import EngineCalls
from stagemesh.services.stage.metrics import ReplicaMetrics
from tests.k8s.helm import CHART, HELMS, NAMESPACE, RELEASE, Values, load_objects, render_text
from tests.k8s.manifests import field, walk
from tests.k8s.release import EXTERNAL, GATEWAY, ISSUER, JOBS, SPEECH, TOKENS, Release, at, merged
from tests.stage.replicas import ready_runtime

ON = {
    "serviceMonitor": {"enabled": True, "labels": {"prometheus": "main"}},
    "prometheusRule": {"enabled": True, "labels": {"prometheus": "main"}, "queuedSeconds": 44},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Stagemesh"}},
}
STAGEMESH_METRIC = re.compile(r"\bstagemesh_[a-z_]+(?=\{)")
KUBERNETES_METRICS = {
    "kube_deployment_spec_replicas",
    "kube_deployment_status_replicas_available",
    "kube_pod_container_status_restarts_total",
}


@pytest.fixture(scope="module")
def monitored() -> Release:
    return Release(at("monitoring", ON))


def expressions(value: Any) -> list[str]:
    """Returns the PromQL expressions of a rule or a dashboard."""
    return [child for path, child in walk(value) if path.rpartition(".")[2] == "expr"]


def test_prometheus_scrapes_the_orchestrators_and_learns_the_release(monitored: Release) -> None:
    endpoint = field(monitored["ServiceMonitor/release"], "spec.endpoints.0")
    relabelings = [(item["targetLabel"], item["replacement"]) for item in endpoint["relabelings"]]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    assert ("stagemesh_release", RELEASE) in relabelings


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
def test_prometheus_scrapes_each_replica(kind: str) -> None:
    release = Release(at("monitoring", {kind[0].lower() + kind[1:]: {"enabled": True}}))
    monitor = release[f"{kind}/release-stages"]
    endpoints = "endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"
    scraped = {each["port"] for each in monitor["spec"][endpoints]}
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    if kind == "ServiceMonitor":
        services = [each for each in release.of_kind("Service") if selector <= each["metadata"]["labels"].items()]
        assert {port["name"] for each in services for port in each["spec"]["ports"]} >= scraped == {"metrics"}
    pods = [each["spec"]["template"] for each in release.of_kind("Deployment", "StatefulSet")]
    stages = [pod for pod in pods if selector <= pod["metadata"]["labels"].items()]
    assert stages
    for pod in stages:
        for container in pod["spec"]["containers"]:
            (port,) = [each for each in container["ports"] if each["name"].startswith("metrics")]
            assert f"--metrics-listen=0.0.0.0:{port['containerPort']}" in container["args"]
            assert kind == "ServiceMonitor" or port["name"] in scraped


def test_monitors_and_rules_have_the_labels_by_which_prometheus_finds_them(monitored: Release) -> None:
    for ref in ("ServiceMonitor/release", "PrometheusRule/release"):
        assert monitored[ref]["metadata"]["labels"]["prometheus"] == "main"


def test_alerts_concern_this_release_alone(monitored: Release) -> None:
    for expression in expressions(monitored["PrometheusRule/release"]):
        assert f'stagemesh_release="{RELEASE}"' in expression or f'namespace="{NAMESPACE}"' in expression


def test_an_alert_fires_above_the_given_backlog(monitored: Release) -> None:
    texts = expressions(monitored["PrometheusRule/release"])
    assert [text.rpartition("> ")[2] for text in texts if "queued_seconds" in text and ">" in text] == ["44"]


def test_alerts_use_metrics_that_exist(monitored: Release) -> None:
    text = " ".join(expressions(monitored["PrometheusRule/release"]))
    assert set(re.findall(r"\b(?:stagemesh|kube)_[a-z_]+(?=\{)", text)) - KUBERNETES_METRICS <= served_metrics()


def test_dashboards_use_metrics_that_exist(monitored: Release) -> None:
    dashboards = [json.loads(text) for item in monitored.of_kind("ConfigMap") for text in item["data"].values()]
    found = {name for text in expressions(dashboards) for name in STAGEMESH_METRIC.findall(text)}
    assert found
    assert found <= served_metrics()


@functools.cache
def served_metrics() -> set[str]:
    """Returns the names of the samples that an orchestrator and a replica serve."""
    pipeline = load_pipeline("speech", check_models=False)
    orchestrator = Orchestrator(pipeline, Fleet(pipeline, ()), max_request_s=60, drain_s=0)
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    families = [*OrchestratorMetrics(orchestrator).collect(), *asyncio.run(_replica_metrics())]
    return {f"{each.name}{suffix}" for each in families for suffix in suffixes.get(each.type, ("",))}


async def _replica_metrics() -> list[Family]:
    async with ready_runtime() as runtime:
        return [*ReplicaMetrics(runtime).collect(), *EngineCalls().metrics()]


def test_grafana_finds_the_dashboards_by_their_label(monitored: Release) -> None:
    maps = monitored.of_kind("ConfigMap")
    assert maps
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)
    assert all(item["metadata"]["annotations"]["grafana_folder"] == "Stagemesh" for item in maps)


def test_traces_go_to_the_collector_of_the_values() -> None:
    release = Release(at("otlp.endpoint", "http://collector.tracing:4317"))
    names = ("orchestrator", "thinker", "vocoder")
    assert {release.env(name)["OTEL_EXPORTER_OTLP_ENDPOINT"] for name in names} == {"http://collector.tracing:4317"}
    sampler = release.env("orchestrator")
    assert sampler["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
    assert float(sampler["OTEL_TRACES_SAMPLER_ARG"]) == 0.1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in Release().env("thinker")


def test_the_test_of_the_release_sends_one_request_and_ends() -> None:
    release = Release(at("test", {"prompt": "Hi: there", "timeoutSeconds": 30, "arguments": ["--seed=1"]}))
    pod = release["Pod/release-test"]
    arguments = field(pod, "spec.containers.0.args")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert arguments[:2] == ["generate", "Hi: there"]
    assert "--seed=1" in arguments
    assert any(f"release-orchestrator.{NAMESPACE}.svc.cluster.local:7780" in argument for argument in arguments)
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["activeDeadlineSeconds"] > 30


def read_notes(folder: Path, helm: str, *changes: Values) -> str:
    """Returns the text of NOTES.txt, which `helm template` does not print, by a copy of the chart that contains it."""
    chart = shutil.copytree(CHART, folder / "chart")
    copied = '{"kind": "ConfigMap", "notes": {{ include "stagemesh/templates/NOTES.txt" . | toJson }}}'
    (chart / "templates" / "notes.yaml").write_text(copied)
    text = render_text(merged(SPEECH, *changes), "--show-only", "templates/notes.yaml", helm=helm, chart=chart)
    notes: str = load_objects(text)[0]["notes"]
    return notes


@pytest.mark.parametrize("helm", HELMS)
def test_the_notes_name_the_next_three_commands(helm: str, tmp_path: Path) -> None:
    lines = [line.strip() for line in read_notes(tmp_path, helm).splitlines()]
    commands = [line for line in lines if line.startswith(("kubectl ", "helm ", "stagemesh "))]
    assert len(commands) == 3
    assert f"helm test {RELEASE} --namespace {NAMESPACE} --logs" in commands


def test_the_notes_name_the_url_of_the_gateways(tmp_path: Path) -> None:
    ingress = at("gateway.ingress", {"enabled": True, "host": "ai.example.com", "tlsSecret": "public"})
    notes = read_notes(tmp_path, "helm4", GATEWAY, ingress)
    url = f"http://release-gateway.{NAMESPACE}.svc.cluster.local:8000/v1"
    assert f"OpenAI's API is served at {url} and https://ai.example.com/v1.\n" in notes


def test_the_notes_name_the_address_of_the_job_servers(tmp_path: Path) -> None:
    address = f"release-jobs.{NAMESPACE}.svc.cluster.local:7795"
    assert f"Jobs are submitted to {address}" in read_notes(tmp_path, "helm4", JOBS)


@pytest.mark.parametrize("helm", HELMS)
def test_the_notes_say_that_connections_are_not_encrypted(helm: str, tmp_path: Path) -> None:
    assert "connections are neither encrypted nor authenticated" in read_notes(tmp_path, helm)


INIT = {"modelCache": {"init": {"image": "fetch:1"}}}
REFERENCE = at("pipeline.stages.vocoder.addresses", ["${VOCODER:-127.0.0.1:50051}"])
RULE = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"protocol": "TCP", "port": 443}]}
DATABASE = at("jobs.databaseSecret", "database")
FORWARDING = [at("gateway.forwardTokens", True), TOKENS]
NO_EVICTION = "the PodDisruptionBudget of {} permits no eviction of its {} pods"
THINKER_STAYS, ORCHESTRATORS_STAY = NO_EVICTION.format("thinker", 1), NO_EVICTION.format("orchestrator", 2)


WARNINGS: dict[str, tuple[list[Values], str]] = {
    "download": ([at("stages.thinker", INIT)], "networkPolicy.stageEgress is empty. The init container of thinker"),
    "variable": ([EXTERNAL, REFERENCE], "the chart cannot read the variables in pipeline.stages.vocoder.addresses"),
    "one pod": ([at("stages.thinker.podDisruptionBudget.minAvailable", 1)], THINKER_STAYS),
    "percentage of one pod": ([at("stages.thinker.podDisruptionBudget.minAvailable", "50%")], THINKER_STAYS),
    "no pod": ([at("orchestrator.podDisruptionBudget.maxUnavailable", 0)], ORCHESTRATORS_STAY),
    "percentage of two pods": ([at("orchestrator.podDisruptionBudget.minAvailable", "51%")], ORCHESTRATORS_STAY),
    "host": ([at("stageDefaults.modelCache", {"existingClaim": None, "hostPath": "/srv/models"})], "hostPath"),
    "no gateway": ([GATEWAY, at("gateway.podDisruptionBudget.maxUnavailable", 0)], NO_EVICTION.format("gateway", 2)),
    "certificate": ([GATEWAY, ISSUER], "everyone who can reach the gateways has the rights of their certificate"),
    "plain tokens": (
        [GATEWAY, ISSUER, *FORWARDING],
        "tokens are sent to them without encryption. Set gateway.httpsSecret",
    ),
    "load balancer": (
        [GATEWAY, at("gateway.service.type", "LoadBalancer")],
        "networkPolicy.gatewayClients must also admit",
    ),
    "database": (
        [JOBS, DATABASE],
        "networkPolicy.jobsEgress is empty, so that job servers cannot reach their database",
    ),
    "no job server": ([JOBS, at("jobs.podDisruptionBudget.maxUnavailable", 0)], NO_EVICTION.format("jobs", 1)),
    "content of videos": (
        [JOBS, GATEWAY, ISSUER, *FORWARDING],
        "gateways that forward them cannot send the content of videos",
    ),
}


@pytest.mark.parametrize(("changes", "warning"), WARNINGS.values(), ids=WARNINGS)
def test_the_notes_warn_of_values_that_may_not_work(changes: list[Values], warning: str, tmp_path: Path) -> None:
    assert warning in read_notes(tmp_path, "helm4", *changes)


WITHOUT_WARNING: dict[str, list[Values]] = {
    "defaults": [],
    "rule": [at("stages.thinker", INIT), at("networkPolicy.stageEgress", [RULE])],
    "no policies": [at("stages.thinker", INIT), at("networkPolicy.enabled", False)],
    "two pods": [at("stages.thinker", {"replicas": 2, "podDisruptionBudget": {"minAvailable": 1}})],
    "no budget": [at("stages.thinker.podDisruptionBudget", {"enabled": False, "minAvailable": 1})],
    "half": [at("orchestrator.podDisruptionBudget.minAvailable", "50%")],
    "SQLite": [JOBS],
    "PostgreSQL": [JOBS, DATABASE, at("networkPolicy.jobsEgress", [RULE])],
}


@pytest.mark.parametrize("changes", WITHOUT_WARNING.values(), ids=WITHOUT_WARNING)
def test_the_notes_do_not_warn_of_values_that_work(changes: list[Values], tmp_path: Path) -> None:
    notes = read_notes(tmp_path, "helm4", *changes)
    assert [part for part in ("stageEgress", "jobsEgress", "PodDisruptionBudget") if part in notes] == []
