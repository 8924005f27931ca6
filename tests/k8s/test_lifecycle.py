"""Probes, drains, rolling updates and generations."""

from typing import Any

import pytest

from tests.k8s.manifests import all_pods, field
from tests.k8s.release import SPEECH, Release, at, settings

LABEL = "stagemesh.dev/generation"
STAGES = ("thinker", "acoustic", "vocoder")


@pytest.fixture(scope="module")
def speech() -> Release:
    return Release()


def halves(release: Release) -> tuple[str, str]:
    """Returns the names of the topology and of the specification, of which a generation consists."""
    topology, spec = release.generation().split("-")
    return topology, spec


def test_readiness_is_the_health_of_the_stages_own_name(speech: Release) -> None:
    services = {name: field(speech.container(name), "readinessProbe.grpc.service") for name in STAGES}
    assert services == {name: name for name in STAGES}


def test_liveness_depends_on_no_other_process(speech: Release) -> None:
    names = (*STAGES, "orchestrator")
    assert {field(speech.container(name), "livenessProbe.grpc.service") for name in names} == {"liveness"}


def test_a_stage_has_started_when_its_engine_is_loaded(speech: Release) -> None:
    services = {field(speech.container(name), "startupProbe.grpc.service") for name in STAGES}
    assert services == {"stagemesh.v1.StageControlService"}


def test_probes_of_a_stage_ask_its_own_port(speech: Release) -> None:
    for name in STAGES:
        container = speech.container(name)
        ports = {container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "liveness", "readiness")}
        assert ports == {container["ports"][0]["containerPort"]}


@pytest.mark.parametrize("seconds", [60, 601, 1800])
def test_an_engine_may_load_for_the_given_time(seconds: int) -> None:
    probe = Release(at("stages.thinker.loadSeconds", seconds)).container("thinker")["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    assert seconds <= allowed < seconds + probe["periodSeconds"]


def test_a_rollout_may_last_as_long_as_the_slowest_stage_loads() -> None:
    release = Release(at("stages.thinker.loadSeconds", 3600))
    assert all(item["spec"]["progressDeadlineSeconds"] > 3600 for item in release.of_kind("Deployment"))


def test_the_orchestrator_is_ready_when_it_accepts_requests(speech: Release) -> None:
    probe = speech.container("orchestrator")["readinessProbe"]["grpc"]
    assert probe == {"port": 7780, "service": "stagemesh.v1.OrchestratorService"}


@pytest.mark.parametrize("seconds", [0, 45, 3600])
def test_the_grace_period_is_longer_than_the_drain(seconds: int) -> None:
    release = Release(at("stages.thinker.drainSeconds", seconds))
    assert f"--drain-s={seconds}" in release.container("thinker")["args"]
    assert release.pod("thinker").spec["terminationGracePeriodSeconds"] == seconds + 30


def test_a_longer_grace_period_can_be_given() -> None:
    release = Release(at("stages.thinker", {"drainSeconds": 60, "terminationGracePeriodSeconds": 200}))
    assert release.pod("thinker").spec["terminationGracePeriodSeconds"] == 200


def test_orchestrators_drain_within_their_grace_period() -> None:
    release = Release(at("orchestrator.drainSeconds", 90))
    assert release.config()["drain_s"] == 90
    assert release.pod("orchestrator").spec["terminationGracePeriodSeconds"] == 120


def test_a_rolling_update_starts_new_pods_before_it_stops_old_ones(speech: Release) -> None:
    strategies = [item["spec"]["strategy"] for item in speech.of_kind("Deployment")]
    assert strategies == [{"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}] * 3


def test_the_surge_of_a_group_is_that_of_the_values() -> None:
    release = Release(at("groups.voice.surge", 3))
    assert field(release["Deployment/release-voice"], "spec.strategy.rollingUpdate.maxSurge") == 3
    assert field(release["Deployment/release-thinker"], "spec.strategy.rollingUpdate.maxSurge") == 1


def test_every_group_and_the_orchestrator_have_a_disruption_budget(speech: Release) -> None:
    budgets = {
        item["metadata"]["name"]: item["spec"]["maxUnavailable"] for item in speech.of_kind("PodDisruptionBudget")
    }
    assert budgets == {"release-orchestrator": 1, "release-thinker": 1, "release-voice": 1}


def test_a_disruption_budget_can_keep_a_percentage() -> None:
    budget = {"minAvailable": "50%"}
    spec = Release(at("groups.voice.podDisruptionBudget", budget))["PodDisruptionBudget/release-voice"]["spec"]
    assert settings(spec, "minAvailable", "maxUnavailable") == ["50%", None]


def test_pods_stages_and_orchestrators_agree_on_the_generation(speech: Release) -> None:
    generation = speech.generation()
    assert {pod.labels[LABEL] for pod in all_pods(speech.of_kind("Deployment"))} == {generation}
    assert all(f"--generation={generation}" in speech.container(name)["args"] for name in STAGES)


def test_the_generation_is_not_part_of_a_selector(speech: Release) -> None:
    selectors = [item["spec"]["selector"] for item in speech.of_kind("Deployment", "Service", "PodDisruptionBudget")]
    assert LABEL not in str(selectors)


def test_orchestrators_accept_each_generation_of_their_topology(speech: Release) -> None:
    assert speech.config()["generations"] == [f"{halves(speech)[0]}-*"]


@pytest.mark.parametrize(
    "change",
    [
        at("pipeline.stages.thinker.options.dtype", "bfloat16"),
        at("pipeline.stages.thinker.model", "smollm3"),
        at("pipeline.stages.thinker.data_plane.arena_bytes", 2**20),
        at("images.stage.tag", "2.0"),
        at("stages.thinker.image.digest", "sha256:" + "0" * 64),
        at("stages.thinker.modelRevision", "v2"),
        at("stages.thinker.env", [{"name": "SCALE", "value": "2"}]),
    ],
    ids=["options", "model", "arena", "tag", "digest", "revision", "environment"],
)
def test_another_specification_is_a_compatible_generation(speech: Release, change: dict[str, Any]) -> None:
    changed = halves(Release(change))
    assert (changed[0], changed[1] != halves(speech)[1]) == (halves(speech)[0], True)


@pytest.mark.parametrize(
    "change",
    [
        at("pipeline.edges", [*SPEECH["pipeline"]["edges"], {"from": "thinker", "to": "vocoder"}]),
        at("pipeline.outputs.text", None),
        at("pipeline.stages.acoustic.function", "hibari.other"),
        at("pipeline.stages.spare", {"engine": "fake"}),
        at("stages.thinker.port", 50060),
    ],
    ids=["edge", "output", "function", "stage", "port"],
)
def test_another_topology_is_an_incompatible_generation(speech: Release, change: dict[str, Any]) -> None:
    assert halves(Release(change))[0] != halves(speech)[0]


@pytest.mark.parametrize(
    "change",
    [
        at("pipeline.stages.thinker.replicas", 3),
        at("pipeline.limits.max_in_flight", 7),
        at("stages.thinker.replicas", 3),
        at("stages.thinker.drainSeconds", 60),
        at("orchestrator.replicas", 3),
        at("images.orchestrator.tag", "2.0"),
    ],
    ids=["replicas of the pipeline", "limits", "replicas", "drain", "orchestrators", "image of the orchestrator"],
)
def test_what_stages_compute_alone_decides_the_generation(speech: Release, change: dict[str, Any]) -> None:
    assert Release(change).generation() == speech.generation()


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        (at("pipeline.stages.thinker.replicas", 3), set()),
        (at("stages.thinker.replicas", 3), set()),
        (at("pipeline.limits.max_in_flight", 7), {"orchestrator"}),
        (at("images.orchestrator.tag", "2.0"), {"orchestrator"}),
        (at("pipeline.stages.thinker.options.dtype", "bfloat16"), {"orchestrator", "thinker", "voice"}),
        (at("groups.voice.nodeSelector", {"gpu": "h200"}), {"voice"}),
        (at("networkPolicy.enabled", False), set()),
        (at("test.prompt", "Hello"), set()),
    ],
    ids=["replicas of the pipeline", "replicas", "limits", "orchestrator", "options", "nodes", "policies", "test"],
)
def test_a_change_restarts_only_the_pods_that_it_concerns(
    speech: Release, change: dict[str, Any], restarted: set[str]
) -> None:
    changed = Release(change)
    names = ("orchestrator", "thinker", "voice")
    assert {name for name in names if changed.pod(name)[2:] != speech.pod(name)[2:]} == restarted


def test_another_version_of_the_chart_does_not_change_the_generation(speech: Release) -> None:
    assert speech.generation() == Release(at("commonLabels.version", "2")).generation()


def test_certificates_from_another_issuer_restart_the_pods() -> None:
    issuers = [Release(at("tls", {"enabled": True, "issuer": {"name": name}})) for name in ("a", "b")]
    assert issuers[0].pod("voice").annotations["checksum/tls"] != issuers[1].pod("voice").annotations["checksum/tls"]
