"""Settings of a stage reach its container, its pod or both."""

from typing import Any

import pytest

from tests.k8s.manifests import field, matches, pods_of
from tests.k8s.release import Release, at, settings

DIGEST = "sha256:" + "ab" * 32
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}]
        }
    }
}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
RDMA = {"enabled": True, "resource": "rdma/hca", "count": 2}
NIXL_EDGE = [
    {"from": "thinker", "to": "acoustic", "connector": "nixl"},
    {"from": "acoustic", "to": "vocoder", "connector": "shm"},
]


@pytest.mark.parametrize(
    ("setting", "value", "path"),
    [
        ("nodeSelector", {"gpu": "h200"}, "nodeSelector"),
        ("tolerations", [TOLERATION], "tolerations"),
        ("affinity", AFFINITY, "affinity"),
        ("priorityClassName", "serving", "priorityClassName"),
        ("runtimeClassName", "nvidia", "runtimeClassName"),
        ("schedulerName", "kueue", "schedulerName"),
    ],
)
def test_a_setting_of_the_pod_arrives(setting: str, value: Any, path: str) -> None:
    release = Release(at(f"stages.thinker.{setting}", value), at(f"groups.voice.{setting}", value))
    assert [field(release.pod(name).spec, path) for name in ("thinker", "voice")] == [value, value]
    assert field(release.pod("orchestrator").spec, path) is None


IMAGE = {"repository": "registry.example/stage", "tag": "1.0", "digest": DIGEST}
RESOURCES = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "16Gi"}}
PINNED = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
OVER_RDMA = at("pipeline.edges", NIXL_EDGE)
CUDA = at("pipeline.stages.thinker.options.device", "cuda")


@pytest.mark.parametrize(
    ("others", "settings_of_stage", "path", "value"),
    [
        pytest.param({}, {"gpus": 4}, "resources.requests", {"nvidia.com/gpu": "4"}, id="requested GPUs"),
        pytest.param({}, {"gpus": 4}, "resources.limits", {"nvidia.com/gpu": "4"}, id="limit of GPUs"),
        pytest.param(
            *({}, {"gpus": 1, "gpuResource": "amd.com/gpu"}, "resources.limits", {"amd.com/gpu": "1"}),
            id="another resource of GPUs",
        ),
        pytest.param({}, {"resources": RESOURCES}, "resources", RESOURCES, id="processors and memory"),
        pytest.param(
            *(CUDA, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "resources.limits", {"nvidia.com/gpu": "1"}),
            id="GPUs among the resources",
        ),
        pytest.param(
            *({}, {"envFrom": [{"secretRef": {"name": "hub"}}]}, "envFrom", [{"secretRef": {"name": "hub"}}]),
            id="secrets as variables",
        ),
        pytest.param({}, {"image": IMAGE}, "image", f"registry.example/stage@{DIGEST}", id="a digest, not the tag"),
        pytest.param(OVER_RDMA, {"rdma": RDMA}, "resources.limits", {"rdma/hca": "2"}, id="RDMA devices"),
        pytest.param(OVER_RDMA, {"rdma": RDMA}, "securityContext.capabilities", PINNED, id="right to pin memory"),
        pytest.param(
            *(OVER_RDMA, {"rdma": {**RDMA, "ipcLock": False}}, "securityContext.capabilities", {"drop": ["ALL"]}),
            id="no right to pin memory",
        ),
    ],
)
def test_a_setting_of_the_container_arrives(
    others: dict[str, Any], settings_of_stage: dict[str, Any], path: str, value: Any
) -> None:
    assert field(Release(others, at("stages.thinker", settings_of_stage)).container("thinker"), path) == value


def test_a_default_of_stages_is_overridden_by_a_stage() -> None:
    release = Release(at("stageDefaults.priorityClassName", "low"), at("stages.thinker.priorityClassName", "high"))
    assert [release.pod(name).spec["priorityClassName"] for name in ("thinker", "voice")] == ["high", "low"]


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


def test_the_number_of_replicas_comes_from_the_pipeline_unless_the_values_set_it() -> None:
    pipeline = at("pipeline.stages.thinker.replicas", 3)
    assert Release(pipeline)["Deployment/release-thinker"]["spec"]["replicas"] == 3
    assert Release(pipeline, at("stages.thinker.replicas", 2))["Deployment/release-thinker"]["spec"]["replicas"] == 2
    assert Release()["Deployment/release-thinker"]["spec"]["replicas"] == 1


def test_a_variable_replaces_that_of_the_chart() -> None:
    given = {"name": "HOME", "value": "/tmp"}
    variables = Release(at("stages.thinker.env", [given])).container("thinker")["env"]
    assert [item for item in variables if item["name"] == "HOME"] == [given]


def test_the_tag_is_the_version_of_the_application_by_default() -> None:
    assert Release().container("thinker")["image"].endswith(":0.1.0")


def test_a_stage_can_have_an_image_of_its_own() -> None:
    release = Release(at("stages.thinker.image", {"repository": "registry.example/vllm", "tag": "7"}))
    images = [release.container(name)["image"] for name in ("thinker", "acoustic")]
    assert images[0] == "registry.example/vllm:7"
    assert images[1] == Release().container("acoustic")["image"]


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


def test_a_claim_of_the_chart_has_the_size_and_the_class_of_the_values() -> None:
    claim = {"size": "10Gi", "storageClass": "fast", "accessMode": "ReadWriteMany"}
    spec = Release(at("groups.voice.modelCache", {"claim": claim}))["PersistentVolumeClaim/release-voice-models"][
        "spec"
    ]
    assert settings(spec, "resources.requests.storage", "storageClassName", "accessModes") == [
        "10Gi",
        "fast",
        ["ReadWriteMany"],
    ]


def test_a_claim_of_the_chart_can_outlive_the_release() -> None:
    kept = {"helm.sh/resource-policy": "keep"}
    claim = {"size": "10Gi", "annotations": kept}
    release = Release(at("groups.voice.modelCache", {"claim": claim}))
    assert release["PersistentVolumeClaim/release-voice-models"]["metadata"]["annotations"] == kept


def test_an_init_container_fills_the_cache_with_the_models_and_their_revisions() -> None:
    init = {"image": "registry.example/fetch:1", "command": ["fetch"]}
    release = Release(at("groups.voice.modelCache.init", init), at("stages.acoustic.modelRevision", "v7"))
    container = field(release.pod("voice").spec, "initContainers.0")
    variables = {item["name"]: item.get("value") for item in container["env"]}
    mounts = {item["mountPath"]: item.get("readOnly", False) for item in container["volumeMounts"]}
    assert variables.items() >= {"MODEL_ACOUSTIC": "hibari", "MODEL_REVISION_ACOUSTIC": "v7"}.items()
    assert mounts["/var/lib/stagemesh/models"] is False


def test_further_volumes_and_mounts_are_added() -> None:
    volume, mount = (
        {"name": "lora", "persistentVolumeClaim": {"claimName": "adapters"}},
        {"name": "lora", "mountPath": "/lora"},
    )
    release = Release(at("groups.voice.volumes", [volume]), at("stages.vocoder.volumeMounts", [mount]))
    assert release.volume("voice", "lora") == {"persistentVolumeClaim": {"claimName": "adapters"}}
    assert mount in release.container("vocoder")["volumeMounts"]
    assert mount not in release.container("acoustic")["volumeMounts"]


def test_further_init_containers_are_added() -> None:
    container = {"name": "warm-up", "image": "registry.example/tool:1"}
    assert Release(at("groups.voice.initContainers", [container])).pod("voice").spec["initContainers"] == [container]


def test_each_group_has_a_service_account_without_rights() -> None:
    release = Release()
    assert release.pod("voice").spec["serviceAccountName"] == "release-voice"
    assert release["ServiceAccount/release-voice"]["automountServiceAccountToken"] is False


def test_a_service_account_can_exist_already() -> None:
    release = Release(at("stageDefaults.serviceAccount", {"create": False, "name": "team"}))
    assert [release.pod(name).spec["serviceAccountName"] for name in ("thinker", "voice")] == ["team", "team"]
    assert "ServiceAccount/team" not in release


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
    release = Release(at("imagePullSecrets", [{"name": "registry"}]))
    pods = [pod for item in release.objects for pod in pods_of(item)]
    assert all(pod.spec["imagePullSecrets"] == [{"name": "registry"}] for pod in pods)


def test_the_input_of_clients_reaches_a_stage_without_nixl() -> None:
    edges = [{**edge, "connector": "grpc"} for edge in NIXL_EDGE]
    release = Release(at("pipeline.edges", [*edges, {"from": "@input", "to": "acoustic"}]))
    assert release.pipeline("orchestrator")["edges"][2] == {"from": "@input", "to": "acoustic"}
    assert "UCX_TCP_PORT_RANGE" not in release.env("acoustic")


def test_settings_of_ucx_become_variables() -> None:
    release = Release(at("pipeline.edges", NIXL_EDGE), at("stages.thinker.ucx", {"UCX_TLS": "rc,tcp"}))
    assert release.env("thinker")["UCX_TLS"] == "rc,tcp"
    assert "UCX_TLS" not in release.env("acoustic")


def test_ucx_listens_in_the_range_that_the_network_policy_opens() -> None:
    release = Release(at("pipeline.edges", NIXL_EDGE))
    ranges = {name: release.env(name).get("UCX_TCP_PORT_RANGE") for name in ("thinker", "acoustic", "vocoder")}
    assert ranges == {"thinker": "18600-18663", "acoustic": "18600-18663", "vocoder": None}


def test_caches_are_below_a_writable_volume() -> None:
    release = Release()
    home = next(item["mountPath"] for item in release.container("thinker")["volumeMounts"] if item["name"] == "home")
    folders = (
        "HOME",
        "STAGEMESH_HOME",
        "XDG_CACHE_HOME",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    )
    assert all(release.env("thinker")[name].startswith(home) for name in folders)


def test_the_zone_of_a_process_is_its_node() -> None:
    variables = {item["name"]: item for item in Release().container("thinker")["env"]}
    assert field(variables["STAGEMESH_ZONE"], "valueFrom.fieldRef.fieldPath") == "spec.nodeName"
