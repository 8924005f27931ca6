"""Settings of the orchestrators, media service, gateways and job servers, which face the clients."""

from typing import Any

import pytest

from tests.k8s.manifests import field
from tests.k8s.release import Release, at, merged, settings
from tests.k8s.test_stage_settings import AFFINITY, SPREAD, TOLERATION

MEDIA = at("pipeline.media.store", "s3://bucket/media")
ALL = merged(MEDIA, at("gateway.enabled", True), at("jobs", {"enabled": True, "databaseSecret": "database"}))
NAMES = ("orchestrator", "media", "gateway", "jobs")
FRONTS = pytest.mark.parametrize("front", NAMES)


@FRONTS
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("nodeSelector", {"pool": "general"}),
        ("tolerations", [TOLERATION]),
        ("affinity", AFFINITY),
        ("priorityClassName", "serving"),
        ("runtimeClassName", "runc"),
        ("schedulerName", "kueue"),
    ],
)
def test_a_setting_of_the_pod_reaches_one_front_alone(front: str, setting: str, value: Any) -> None:
    release = Release(ALL, at(f"{front}.{setting}", value))
    found = {name: release.pod(name).spec.get(setting) for name in (*NAMES, "thinker")}
    assert found == {**dict.fromkeys((*NAMES, "thinker")), front: value}


@FRONTS
def test_the_container_of_a_front_has_the_given_resources_and_environment(front: str) -> None:
    given: dict[str, Any] = {
        "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "3Gi"}},
        "env": [{"name": "AWS_REGION", "value": "eu-1"}],
        "envFrom": [{"secretRef": {"name": "store"}}],
    }
    container = Release(ALL, at(front, given)).container(front)
    assert settings(container, "resources.requests.cpu", "resources.limits.memory") == ["2", "3Gi"]
    assert given["env"][0] in container["env"]
    assert container["envFrom"] == given["envFrom"]


@FRONTS
def test_a_front_has_the_given_number_of_replicas_and_surge(front: str) -> None:
    release = Release(ALL, at(front, {"replicas": 3, "surge": 2}))
    spec = release[f"Deployment/release-{front}"]["spec"]
    assert settings(spec, "replicas", "strategy.rollingUpdate") == [3, {"maxUnavailable": 0, "maxSurge": 2}]


@FRONTS
def test_pods_of_a_front_spread_and_have_labels_and_an_account(front: str) -> None:
    given = {
        "topologySpreadConstraints": [SPREAD],
        "podLabels": {"cost": "7"},
        "podAnnotations": {"note": "x"},
        "serviceAccount": {"create": False, "name": "team"},
    }
    pod = Release(ALL, at(front, given)).pod(front)
    constraint = pod.spec["topologySpreadConstraints"][0]
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == front
    assert (pod.labels["cost"], pod.annotations["note"], pod.spec["serviceAccountName"]) == ("7", "x", "team")


@FRONTS
def test_a_load_balancer_exposes_a_front_with_its_annotations(front: str) -> None:
    given = {"service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}}}
    service = Release(ALL, at(front, given))[f"Service/release-{front}"]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"lb": "internal"}


@FRONTS
def test_the_disruption_budget_of_a_front_can_be_turned_off(front: str) -> None:
    ref = f"PodDisruptionBudget/release-{front}"
    assert ref in Release(ALL)
    assert ref not in Release(ALL, at(f"{front}.podDisruptionBudget.enabled", False))


def test_the_service_of_clients_has_the_given_port_and_networks() -> None:
    given = {
        "type": "LoadBalancer",
        "nodePort": 30780,
        "loadBalancerClass": "x/y",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }
    spec = Release(at("orchestrator.service", given))["Service/release-orchestrator"]["spec"]
    assert settings(spec, "ports.0.nodePort", "loadBalancerClass", "loadBalancerSourceRanges") == [
        30780,
        "x/y",
        ["10.0.0.0/8"],
    ]


def test_limits_of_requests_and_checkpoints_reach_the_config() -> None:
    config = Release(at("orchestrator", {"maxRequestSeconds": 90, "maxKeptStateBytes": 2**33})).config()
    assert (config["max_request_s"], config["max_kept_state_bytes"]) == (90, 2**33)


def test_orchestrators_serve_clients_and_operators_on_ports_of_their_own() -> None:
    release = Release()
    config = release.config()
    numbers = {port["name"]: port["containerPort"] for port in release.container("orchestrator")["ports"]}
    assert numbers == {"grpc": 7780, "admin": 7781, "metrics": 9464}
    assert (config["listen"], config["admin_listen"]) == ("0.0.0.0:7780", "0.0.0.0:7781")


def test_clients_outside_the_cluster_learn_the_address_of_the_media_service() -> None:
    release = Release(MEDIA, at("media.endpoint", "media.example.com:443"))
    assert release.config()["media_endpoint"] == "media.example.com:443"


def test_the_media_service_has_an_image_of_its_own_if_the_values_name_one() -> None:
    release = Release(MEDIA, at("media.image", {"tag": "with-s3"}))
    assert release.container("media")["image"].endswith(":with-s3")
    assert not release.container("orchestrator")["image"].endswith(":with-s3")


def test_the_media_service_reads_the_pipeline_of_its_pod() -> None:
    release = Release(MEDIA)
    arguments = release.container("media")["args"]
    assert arguments[:3] == ["serve", "media", "--pipeline=/etc/stagemesh/pipeline.yaml"]
    assert field(release.pipeline("media"), "media.store") == "s3://bucket/media"


def test_a_folder_of_media_is_mounted_in_every_pod_that_uses_it() -> None:
    volume, mount = (
        {"name": "media", "persistentVolumeClaim": {"claimName": "media"}},
        {"name": "media", "mountPath": "/media"},
    )
    given = {"volumes": [volume], "volumeMounts": [mount]}
    release = Release(at("pipeline.media.store", "/media"), at("media", given), at("stageDefaults", given))
    assert all(mount in release.container(name)["volumeMounts"] for name in ("media", "thinker", "acoustic", "vocoder"))
