"""Values that become fields of objects: settings of stages, and of the services that face the clients."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.helm import read_values
from tests.k8s.manifests import all_pods, field, matches
from tests.k8s.release import SHARED, Release, at, release_of

CASES = read_values(Path(__file__).with_name("settings.yaml"))
CASES_OF_FRONTS = read_values(Path(__file__).with_name("front_settings.yaml"))
FRONTS = ("orchestrator", "media", "gateway", "jobs")
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}]
        }
    }
}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
OF_PODS = {
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": AFFINITY,
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "schedulerName": "kueue",
}


def check(case: Mapping[str, Any]) -> None:
    """Checks the fields that the values of a case become."""
    release = release_of(case)
    assert {place: release.value(place) for place in case.get("equal", {})} == case.get("equal", {})
    for place, items in case.get("contain", {}).items():
        assert [item for item in items if item not in release.value(place)] == []
    for place, items in case.get("lack", {}).items():
        assert [item for item in items if item in release.value(place)] == []
    assert not release.of_kind(*case.get("none", []))


@pytest.mark.parametrize("name", CASES)
def test_a_value_becomes_fields_of_objects(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", CASES_OF_FRONTS)
def test_a_value_of_a_front_becomes_fields_of_objects(name: str, front: str) -> None:
    check(json.loads(json.dumps(CASES_OF_FRONTS[name]).replace("FRONT", front)))


@pytest.mark.parametrize("place", ["stages.thinker", "groups.voice", *FRONTS])
def test_settings_of_a_pod_reach_this_pod_alone(place: str) -> None:
    release, names = Release(SHARED["fronts"], at(place, OF_PODS)), (*FRONTS, "thinker", "voice")
    found = {name: {setting: release.pod(name).spec.get(setting) for setting in OF_PODS} for name in names}
    assert found == {**dict.fromkeys(names, dict.fromkeys(OF_PODS)), place.rpartition(".")[2]: OF_PODS}


def test_a_default_of_stages_can_be_overridden_by_false_and_zero() -> None:
    release = Release(
        at("stageDefaults.podDisruptionBudget.enabled", True),
        at("stages.thinker.podDisruptionBudget.enabled", False),
        at("stageDefaults.gpus", 1),
        at("stages.thinker.gpus", 0),
    )
    assert "PodDisruptionBudget/release-thinker" not in release
    assert "PodDisruptionBudget/release-voice" in release
    assert "nvidia.com/gpu" not in field(release.container("thinker"), "resources.limits", {})


def test_a_variable_replaces_that_of_the_chart() -> None:
    given = {"name": "HOME", "value": "/tmp"}
    variables = Release(at("stages.thinker.env", [given])).container("thinker")["env"]
    assert [item for item in variables if item["name"] == "HOME"] == [given]


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({"existingClaim": "weights"}, {"persistentVolumeClaim": {"claimName": "weights"}}),
        ({"claim": {"size": "10Gi"}}, {"persistentVolumeClaim": {"claimName": "release-thinker-models"}}),
        ({"hostPath": "/srv/models"}, {"hostPath": {"path": "/srv/models", "type": "Directory"}}),
        ({"none": True}, None),
    ],
)
def test_models_come_from_the_cache_of_the_values(cache: dict[str, Any], volume: dict[str, Any] | None) -> None:
    release = Release(at("stages.thinker.modelCache", cache))
    mounts = [item for item in release.container("thinker")["volumeMounts"] if item["name"] == "models"]
    assert release.volume("thinker", "models") == volume
    assert all(item["readOnly"] for item in mounts)
    assert len(mounts) == (volume is not None)


def test_an_init_container_fills_the_cache_with_the_models_and_their_revisions() -> None:
    init = {"image": "registry.example/fetch:1", "command": ["fetch"]}
    release = Release(at("groups.voice.modelCache.init", init), at("stages.acoustic.modelRevision", "v7"))
    container = field(release.pod("voice").spec, "initContainers.0")
    variables = {item["name"]: item.get("value") for item in container["env"]}
    mounts = {item["mountPath"]: item.get("readOnly", False) for item in container["volumeMounts"]}
    assert variables.items() >= {"MODEL_ACOUSTIC": "hibari", "MODEL_REVISION_ACOUSTIC": "v7"}.items()
    assert mounts["/var/lib/stagemesh/models"] is False


def test_labels_and_annotations_reach_objects_and_pods() -> None:
    release = Release(
        at("commonLabels.team", "speech"),
        at("commonAnnotations.owner", "a@example.org"),
        at("groups.voice.podLabels.cost", "7"),
        at("groups.voice.podAnnotations.note", "x"),
    )
    pod = release.pod("voice")
    assert all(item["metadata"]["labels"]["team"] == "speech" for item in release.objects)
    assert all(item["metadata"]["annotations"]["owner"] == "a@example.org" for item in release.objects)
    assert (pod.labels["team"], pod.labels["cost"]) == ("speech", "7")
    assert (pod.annotations["owner"], pod.annotations["note"]) == ("a@example.org", "x")


def test_common_labels_do_not_enter_selectors() -> None:
    release = Release(at("commonLabels.team", "speech"))
    assert all("team" not in field(item, "spec.selector.matchLabels") for item in release.of_kind("Deployment"))


def test_a_spread_constraint_counts_the_pods_of_its_own_workload() -> None:
    release = Release(at("stageDefaults.topologySpreadConstraints", [SPREAD]))
    selector = field(release.pod("voice").spec, "topologySpreadConstraints.0.labelSelector")
    assert matches(selector, release.pod("voice").labels)
    assert not matches(selector, release.pod("thinker").labels)


def test_image_pull_secrets_reach_every_pod() -> None:
    pods = all_pods(Release(at("imagePullSecrets", [{"name": "registry"}])).objects)
    assert all(pod.spec["imagePullSecrets"] == [{"name": "registry"}] for pod in pods)


def test_caches_are_below_a_writable_volume() -> None:
    release = Release()
    home = next(item["mountPath"] for item in release.container("thinker")["volumeMounts"] if item["name"] == "home")
    of_libraries = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in ("HOME", "STAGEMESH_HOME", "XDG_CACHE_HOME", *of_libraries):
        assert release.env("thinker")[name].startswith(home), name


def test_the_zone_of_a_process_is_its_node() -> None:
    variables = {item["name"]: item for item in Release().container("thinker")["env"]}
    assert field(variables["STAGEMESH_ZONE"], "valueFrom.fieldRef.fieldPath") == "spec.nodeName"
