"""Autoscalers, their signals, and the warm tier."""

import re

import pytest

from stagemesh.orchestrator.metrics.prometheus import SCALING_METRICS
from tests.k8s.helm import NAMESPACE, RELEASE
from tests.k8s.manifests import field, matches
from tests.k8s.release import KEDA, PROMETHEUS, Release, at

SCALING = {**KEDA, "queuedSeconds": 3, "playoutAtRisk": 2}
HPA = {**SCALING, "kind": "hpa"}


def _targets(release: Release, name: str) -> dict[str, str]:
    """Returns the target of each signal that a ScaledObject queries, by metric and stage."""
    labels = f'namespace="{NAMESPACE}",stagemesh_release="{RELEASE}",stage='
    triggers = field(release[f"ScaledObject/release-{name}"], "spec.triggers")
    assert all(each["metadata"]["query"].startswith("sum(stagemesh_stage_") for each in triggers)
    return {
        each["metadata"]["query"][len("sum(stagemesh_stage_") : -1].replace(labels, ""): each["metadata"]["threshold"]
        for each in triggers
    }


def test_keda_queries_the_sums_of_the_signals_with_a_target() -> None:
    release = Release(at("stages.thinker.autoscaling", SCALING))
    assert _targets(release, "thinker") == {'queued_seconds{"thinker"}': "3", 'playout_at_risk{"thinker"}': "2"}
    for trigger in field(release["ScaledObject/release-thinker"], "spec.triggers"):
        assert trigger["type"] == "prometheus"
        assert trigger["metadata"]["serverAddress"] == PROMETHEUS["address"]
        assert (trigger["metadata"]["activationThreshold"], trigger["metadata"]["ignoreNullValues"]) == ("0", "false")


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_autoscalers_read_metrics_that_orchestrators_serve(kind: str) -> None:
    scaling = {**SCALING, "kind": kind, "inFlight": 8}
    text = str(Release(at("stages.thinker.autoscaling", scaling)).of_kind("ScaledObject", "HorizontalPodAutoscaler"))
    assert set(re.findall(r"stagemesh_stage_\w+", text)) == set(SCALING_METRICS)


def test_small_and_large_targets_are_written_out() -> None:
    scaling = {**SCALING, "queuedSeconds": 0.5, "playoutAtRisk": 1e-7, "inFlight": 1e7}
    targets = _targets(Release(at("stages.thinker.autoscaling", scaling)), "thinker")
    assert [float(value) for value in targets.values()] == [1e7, 1e-7, 0.5]


def test_keda_authenticates_itself_if_the_values_say_how() -> None:
    prometheus = {**PROMETHEUS, "authModes": "bearer", "authenticationRef": {"name": "prometheus"}}
    triggers = {
        name: field(Release(at("stages.thinker.autoscaling", scaling))["ScaledObject/release-thinker"], "spec.triggers")
        for name, scaling in {"open": SCALING, "protected": {**SCALING, "prometheus": prometheus}}.items()
    }
    for trigger in triggers["protected"]:
        assert (trigger["metadata"]["authModes"], trigger["authenticationRef"]) == ("bearer", {"name": "prometheus"})
    assert not any("authModes" in each["metadata"] or "authenticationRef" in each for each in triggers["open"])


def test_a_stage_with_a_running_step_is_not_scaled_to_nothing() -> None:
    scaling = {**SCALING, "minReplicas": 0}
    release = Release(at("stages.thinker", {"autoscaling": scaling, "warm": {"replicas": 1}}))
    assert _targets(release, "thinker")['in_flight{"thinker"}'] == "1000000"
    busy = Release(at("stages.thinker", {"autoscaling": {**scaling, "inFlight": 8}, "warm": {"replicas": 1}}))
    assert _targets(busy, "thinker")['in_flight{"thinker"}'] == "8"


def test_each_stage_of_a_group_can_ask_for_replicas() -> None:
    release = Release(at("groups.voice.autoscaling", {**SCALING, "playoutAtRisk": 0}))
    assert _targets(release, "voice") == {'queued_seconds{"acoustic"}': "3", 'queued_seconds{"vocoder"}': "3"}


def test_an_hpa_scales_by_the_metrics_of_this_release_and_stage() -> None:
    spec = Release(at("stages.thinker.autoscaling", HPA))["HorizontalPodAutoscaler/release-thinker"]["spec"]
    external = [metric["external"] for metric in spec["metrics"]]
    targets = {item["metric"]["name"]: item["target"]["averageValue"] for item in external}
    labels = {"stagemesh_release": RELEASE, "stage": "thinker"}
    assert targets.items() >= {"stagemesh_stage_queued_seconds": "3", "stagemesh_stage_playout_at_risk": "2"}.items()
    assert all(item["metric"]["selector"]["matchLabels"] == labels for item in external)
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 5)


def test_a_signal_without_a_target_is_left_out_of_an_hpa() -> None:
    release = Release(at("stages.thinker.autoscaling", {**HPA, "playoutAtRisk": 0}))
    assert "stagemesh_stage_playout_at_risk" not in str(release["HorizontalPodAutoscaler/release-thinker"])


def test_a_warm_tier_is_a_deployment_of_its_own() -> None:
    release = Release(at("stages.thinker.warm", {"replicas": 2, "sleepAfterSeconds": 33}))
    warm = release["Deployment/release-thinker-warm"]["spec"]
    arguments = field(warm, "template.spec.containers.0.args")
    assert warm["replicas"] == 2
    assert "--sleep-when-idle-s=33" in arguments
    assert not any("--sleep" in argument for argument in release.container("thinker")["args"])


def test_the_warm_tier_differs_from_the_serving_one_only_in_its_sleep() -> None:
    release = Release(at("stages.thinker.warm.replicas", 1))
    warm, serving = release.pod("thinker-warm"), release.pod("thinker")
    arguments = [item for item in warm.containers[0]["args"] if not item.startswith("--sleep-when-idle-s")]
    assert {**warm.containers[0], "args": arguments} == serving.containers[0]


def test_neither_tier_owns_pods_of_the_other_but_the_service_finds_both() -> None:
    release = Release(at("stages.thinker.warm.replicas", 1))
    tiers = {name: release.pod(name).labels for name in ("thinker", "thinker-warm")}
    for name in tiers:
        selector = release[f"Deployment/release-{name}"]["spec"]["selector"]
        assert [other for other, labels in tiers.items() if matches(selector, labels)] == [name]
    service = {"matchLabels": release["Service/release-thinker"]["spec"]["selector"]}
    assert all(matches(service, labels) for labels in tiers.values())
