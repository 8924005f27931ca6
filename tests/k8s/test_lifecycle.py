"""Probes, drains, rolling updates and generations."""

from pathlib import Path

import pytest

from tests.k8s.helm import read_values
from tests.k8s.manifests import all_pods
from tests.k8s.release import SHARED, Release, at, release_of

LABEL = "stagemesh.dev/generation"
CHANGES = read_values(Path(__file__).with_name("generations.yaml"))
STAGES = ("thinker", "acoustic", "vocoder")


@pytest.fixture(scope="module")
def speech() -> Release:
    return Release()


def changed_by(effect: str, name: str) -> Release:
    """Returns the release with the values of a change."""
    return release_of(CHANGES[effect][name])


def halves(release: Release) -> tuple[str, str]:
    """Returns the names of the topology and of the specification, of which a generation consists."""
    topology, spec = release.generation().split("-")
    return topology, spec


def test_probes_of_a_stage_ask_its_own_port(speech: Release) -> None:
    for name in STAGES:
        assert speech.probe_ports(name) == {speech.container(name)["ports"][0]["containerPort"]}


@pytest.mark.parametrize("seconds", [60, 601, 1800])
def test_an_engine_may_load_for_the_given_time(seconds: int) -> None:
    probe = Release(at("stages.thinker.loadSeconds", seconds)).container("thinker")["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    assert seconds <= allowed < seconds + probe["periodSeconds"]


def test_a_rollout_may_last_as_long_as_the_slowest_stage_loads() -> None:
    release = Release(at("stages.thinker.loadSeconds", 3600))
    assert all(item["spec"]["progressDeadlineSeconds"] > 3600 for item in release.of_kind("Deployment"))


def test_pods_stages_and_orchestrators_agree_on_the_generation(speech: Release) -> None:
    generation = speech.generation()
    assert {pod.labels[LABEL] for pod in all_pods(speech.of_kind("Deployment"))} == {generation}
    assert all(f"--generation={generation}" in speech.container(name)["args"] for name in STAGES)


def test_the_generation_is_not_part_of_a_selector(speech: Release) -> None:
    selectors = [item["spec"]["selector"] for item in speech.of_kind("Deployment", "Service", "PodDisruptionBudget")]
    assert LABEL not in str(selectors)


def test_orchestrators_accept_each_generation_of_their_topology(speech: Release) -> None:
    assert speech.config()["generations"] == [f"{halves(speech)[0]}-*"]


@pytest.mark.parametrize("name", CHANGES["specification"])
def test_another_specification_is_a_compatible_generation(speech: Release, name: str) -> None:
    changed = halves(changed_by("specification", name))
    assert (changed[0], changed[1] != halves(speech)[1]) == (halves(speech)[0], True)


@pytest.mark.parametrize("name", CHANGES["topology"])
def test_another_topology_is_an_incompatible_generation(speech: Release, name: str) -> None:
    assert halves(changed_by("topology", name))[0] != halves(speech)[0]


@pytest.mark.parametrize("name", CHANGES["none"])
def test_what_stages_compute_alone_decides_the_generation(speech: Release, name: str) -> None:
    assert changed_by("none", name).generation() == speech.generation()


@pytest.mark.parametrize("name", CHANGES["restarts"])
def test_a_change_restarts_only_the_pods_that_it_concerns(speech: Release, name: str) -> None:
    changed, names = changed_by("restarts", name), ("orchestrator", "thinker", "voice")
    restarted = [name for name in names if changed.pod(name)[2:] != speech.pod(name)[2:]]
    assert restarted == CHANGES["restarts"][name]["pods"]


@pytest.mark.parametrize("front", ["gateway", "jobs"])
def test_a_new_model_restarts_neither_gateways_nor_job_servers(front: str) -> None:
    before, after = (Release(SHARED[front], at("pipeline.stages.thinker.model", name)) for name in ("smollm2", "qwen3"))
    assert before.generation() != after.generation()
    assert before[f"Deployment/release-{front}"] == after[f"Deployment/release-{front}"]


def test_certificates_from_another_issuer_restart_the_pods() -> None:
    issuers = [Release(at("tls", {"enabled": True, "issuer": {"name": name}})) for name in ("a", "b")]
    assert issuers[0].pod("voice").annotations["checksum/tls"] != issuers[1].pod("voice").annotations["checksum/tls"]
