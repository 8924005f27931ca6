"""Seeds faults into sound manifests, and expects that each is found and named."""

import json
from decimal import Decimal
from typing import Any

import pytest
import yaml

from tests.k8s.checks import find_problems
from tests.k8s.checks.scalars import parse_quantity
from tests.k8s.checks.schemas import VERSIONS, check_schemas
from tests.k8s.helm import load_objects
from tests.k8s.manifests import Manifest, Render, select
from tests.repository.commands import ROOT

SOUND = (ROOT / "tests" / "k8s" / "sound.yaml").read_text()
EXISTING = frozenset({"hub", "weights"})
REMOVED = object()

STAGE, ORCHESTRATOR = "Deployment/tts-vocoder", "Deployment/tts-orchestrator"
SERVICE, BUDGET, POLICY = "Service/tts-vocoder", "PodDisruptionBudget/tts-vocoder", "NetworkPolicy/tts-vocoder"
HPA, KEDA, LWS = "HorizontalPodAutoscaler/tts-vocoder", "ScaledObject/tts-talker", "LeaderWorkerSet/tts-thinker"
INGRESS, BACKEND = "Ingress/tts", "spec rules 0 http paths 0 backend service"
POD = "spec template spec"
CONTAINER = f"{POD} containers 0"
OTHER_LABELS = {"app.kubernetes.io/instance": "other"}
LONG = "a" * 64
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "stringData": {"a": "b"}}

# The object, the path of the field (with spaces), its new value, and what the problem must contain.
FAULTS: list[tuple[str, str, Any, str]] = [
    # Names, labels and annotations
    (STAGE, "metadata name", "Vocoder", "metadata.name is not a DNS label"),
    (STAGE, "metadata name", LONG, "metadata.name is not a DNS label"),
    (SERVICE, "metadata name", "1-vocoder", "metadata.name is not a DNS label"),
    (STAGE, "metadata labels app.kubernetes.io/name", LONG, "is not the value of a label"),
    (STAGE, "metadata labels app.kubernetes.io/name", True, "is not the value of a label"),
    (STAGE, "metadata labels", {"a b": "c"}, "'a b' is not a valid key"),
    (STAGE, "spec template metadata annotations", {"stagemesh.dev/pipeline": 3}, "is not a string"),
    (STAGE, "spec template metadata annotations", {"stagemesh.dev/pipeline": "a" * 300_000}, "more than 262144 bytes"),
    # Enumerations, quantities and nulls
    (STAGE, f"{CONTAINER} imagePullPolicy", "Sometimes", "imagePullPolicy is 'Sometimes'"),
    (STAGE, f"{POD} tolerations 0 effect", "Noschedule", "tolerations.0.effect is 'Noschedule'"),
    (STAGE, f"{POD} volumes 0 emptyDir medium", "memory", "emptyDir.medium is 'memory'"),
    (STAGE, "spec strategy type", "Rolling", "spec.strategy.type is 'Rolling'"),
    (SERVICE, "spec type", "Headless", "spec.type is 'Headless'"),
    (POLICY, "spec policyTypes 0", "ingress", "spec.policyTypes.0 is 'ingress'"),
    (HPA, "spec metrics 0 external target type", "Average", "target.type is 'Average'"),
    (STAGE, f"{CONTAINER} resources limits memory", "2GB", "'2GB' is not a quantity"),
    (STAGE, f"{POD} volumes 0 emptyDir sizeLimit", "320 Mi", "'320 Mi' is not a quantity"),
    (STAGE, f"{POD} priorityClassName", None, "priorityClassName is null"),
    # Ports
    (STAGE, f"{CONTAINER} ports 0 containerPort", 70_000, "70000 is not a port"),
    (STAGE, f"{CONTAINER} ports 0 name", "grpc-of-the-vocoder", "is not the name of a port"),
    (STAGE, f"{CONTAINER} ports 0 name", "50051", "is not the name of a port"),
    (STAGE, f"{CONTAINER} ports 0 protocol", REMOVED, "port 50051 has no protocol"),
    (STAGE, f"{CONTAINER} ports 0 hostPort", 50051, "occupies a port of the host"),
    (SERVICE, "spec ports 0 protocol", REMOVED, "port 50051 has no protocol"),
    (ORCHESTRATOR, f"{CONTAINER} ports 1 containerPort", 7780, "port (7780, 'TCP') occurs twice"),
    (ORCHESTRATOR, f"{CONTAINER} ports 1 name", "grpc", "name 'grpc' occurs twice"),
    # Probes
    (STAGE, f"{CONTAINER} readinessProbe grpc port", 50052, "readinessProbe: the container has no port 50052"),
    (STAGE, f"{CONTAINER} livenessProbe", {"tcpSocket": {"port": "http"}},
     "livenessProbe: the container has no port 'http'"),
    (STAGE, f"{CONTAINER} livenessProbe", {"periodSeconds": 3}, "livenessProbe: has 0 handlers"),
    (STAGE, f"{CONTAINER} livenessProbe successThreshold", 2, "successThreshold is not 1"),
    (STAGE, f"{CONTAINER} startupProbe failureThreshold", 0, "failureThreshold is less than 1"),
    # Volumes
    (STAGE, f"{CONTAINER} volumeMounts 0 name", "shared", "the pod has no volume 'shared'"),
    (STAGE, f"{CONTAINER} volumeMounts 0", REMOVED, "volumes[shm]: no container mounts it"),
    (STAGE, f"{CONTAINER} volumeMounts 1 mountPath", "/dev/shm/", "mountPath '/dev/shm' occurs twice"),
    (STAGE, f"{CONTAINER} volumeMounts 1 mountPath", "etc", "is not an absolute path"),
    (STAGE, f"{POD} volumes 0 name", "files", "name 'files' occurs twice"),
    (STAGE, f"{POD} volumes 0 configMap", {"name": "weights"}, "volumes[shm]: has 2 sources"),
    (STAGE, "spec template metadata annotations", {"other": "x"}, "the pod has no annotation 'stagemesh.dev/pipeline'"),
    (STAGE, f"{POD} volumes 1 downwardAPI items 0 fieldRef fieldPath", "status.podIP",
     "is not a field that the downward"),
    # Environment
    (STAGE, f"{CONTAINER} env 1 name", "POD_IP", "variable 'POD_IP' occurs twice"),
    (STAGE, f"{CONTAINER} env 1 name", "UCX-TLS", "'UCX-TLS' is not the name of a variable"),
    (STAGE, f"{CONTAINER} env 1 value", True, "the value of UCX_TLS is not a string"),
    (STAGE, f"{CONTAINER} env 0 value", "10.0.0.1", "POD_IP has both value and valueFrom"),
    (STAGE, f"{CONTAINER} env 0 valueFrom fieldRef fieldPath", "status.ip",
     "is not a field that the downward API offers"),
    (STAGE, f"{CONTAINER} args 3", "$(PODIP):50051", "$(PODIP) is not a variable of the container"),
    # Resources
    (STAGE, f"{CONTAINER} resources requests memory", "3Gi", "the request of memory (3Gi) is above its limit (2Gi)"),
    (STAGE, f"{CONTAINER} resources limits nvidia.com/gpu", 1, "the amount of nvidia.com/gpu is not quoted"),
    (STAGE, f"{CONTAINER} resources limits nvidia.com/gpu", "1500m", "nvidia.com/gpu is not a whole number"),
    (STAGE, f"{CONTAINER} resources limits nvidia.com/gpu", "2", "the request of nvidia.com/gpu differs"),
    (STAGE, f"{CONTAINER} resources limits nvidia.com/gpu", REMOVED, "has a request without a limit"),
    (STAGE, f"{CONTAINER} resources limits memory", "2147483648000m", "is a fraction of a byte"),
    (STAGE, f"{POD} volumes 0 emptyDir sizeLimit", "4Gi", "its size is above the memory limits"),
    (STAGE, f"{POD} volumes 0 emptyDir sizeLimit", REMOVED, "is in memory without a sizeLimit"),
    # References
    (STAGE, "spec selector matchLabels", OTHER_LABELS, "spec.selector does not select its own pods"),
    (STAGE, "spec selector matchLabels", {"app.kubernetes.io/instance": "tts"},
     "also selects pods of Deployment/tts-orch"),
    (STAGE, "spec selector matchLabels", REMOVED, "spec.selector is empty"),
    (SERVICE, "spec selector", OTHER_LABELS, "spec.selector selects no pod"),
    (SERVICE, "spec selector", REMOVED, "spec.selector selects no pod"),
    (SERVICE, "spec ports 0 targetPort", "http", "Deployment/tts-vocoder has 0 ports 'http'"),
    (SERVICE, "spec ports 0 targetPort", 7780, "Deployment/tts-vocoder has 0 ports 7780"),
    ("Service/tts-orchestrator", "spec ports 1 name", "grpc", "spec.ports need different names"),
    (INGRESS, f"{BACKEND} port name", "http", "Service/tts-orchestrator has no port 'http'"),
    (INGRESS, f"{BACKEND} name", "tts-gateway", "Service/tts-gateway has no port 'grpc'"),
    (INGRESS, "spec tls", [{"secretName": "public"}], "spec.tls: Secret/public does not exist"),
    (BUDGET, "spec selector matchLabels", OTHER_LABELS, "spec.selector selects pods of 0 workloads"),
    (BUDGET, "spec minAvailable", 1, "needs either minAvailable or maxUnavailable"),
    (HPA, "spec scaleTargetRef name", "tts-vocoders", "Deployment/tts-vocoders does not exist"),
    (HPA, "spec scaleTargetRef name", "tts-talker", "Deployment/tts-talker: has two autoscalers"),
    (HPA, "spec minReplicas", 9, "spec.minReplicas is above spec.maxReplicas"),
    (STAGE, "spec replicas", 2, "spec.replicas belongs to HorizontalPodAutoscaler/tts-vocoder"),
    (KEDA, "spec scaleTargetRef name", "talker", "Deployment/talker does not exist"),
    (KEDA, "spec minReplicaCount", 9, "spec.minReplicaCount is above spec.maxReplicaCount"),
    (ORCHESTRATOR, "spec replicas", REMOVED, "has neither spec.replicas nor an autoscaler"),
    ("ServiceMonitor/tts", "spec selector matchLabels", OTHER_LABELS, "spec.selector selects nothing"),
    ("ServiceMonitor/tts", "spec endpoints 0 port", "prometheus", "nothing that it selects has a port 'prometheus'"),
    (STAGE, f"{POD} serviceAccountName", "vocoder", "ServiceAccount/vocoder does not exist"),
    (STAGE, f"{POD} volumes 2 persistentVolumeClaim claimName", "models",
     "PersistentVolumeClaim/models does not exist"),
    (STAGE, f"{CONTAINER} env 2 valueFrom secretKeyRef name", "hugging", "Secret/hugging does not exist"),
    # Network policies
    (POLICY, "spec podSelector matchLabels", OTHER_LABELS, "spec.podSelector selects no pod"),
    (POLICY, "spec ingress 0 from 0 podSelector matchLabels", OTHER_LABELS, "selects no pod"),
    (POLICY, "spec ingress 0 ports 0 port", 50052, "no selected pod has the port 50052"),
    (POLICY, "spec egress 0 ports 0 port", 7780, "no selected pod has the port 7780"),
    (POLICY, "spec egress 0 ports 1 endPort", 20_000, "endPort is below port 30000"),
    (POLICY, "spec egress 0 ports 0 protocol", REMOVED, "port 50051 has no protocol"),
    (POLICY, "spec policyTypes", ["Ingress"], "spec.egress has no effect without Egress"),
    # Security
    (STAGE, f"{POD} hostIPC", True, "hostIPC is true"),
    (STAGE, f"{POD} automountServiceAccountToken", REMOVED, "automountServiceAccountToken is not false"),
    (STAGE, f"{POD} securityContext runAsNonRoot", REMOVED, "runAsNonRoot is not true"),
    (STAGE, f"{POD} securityContext runAsUser", 0, "runs as root"),
    (STAGE, f"{POD} securityContext seccompProfile", REMOVED, "seccompProfile.type is not RuntimeDefault"),
    (STAGE, f"{CONTAINER} securityContext allowPrivilegeEscalation", True, "allowPrivilegeEscalation is not false"),
    (STAGE, f"{CONTAINER} securityContext privileged", True, "is privileged"),
    (STAGE, f"{CONTAINER} securityContext readOnlyRootFilesystem", REMOVED, "readOnlyRootFilesystem is not true"),
    (STAGE, f"{CONTAINER} securityContext capabilities drop", ["NET_RAW"], "does not drop all capabilities"),
    (STAGE, f"{CONTAINER} securityContext capabilities add", ["SYS_ADMIN"], "adds the capability SYS_ADMIN"),
    (STAGE, f"{POD} volumes 2", {"name": "models", "hostPath": {"path": "/models"}}, "hostPath is not allowed"),
    (STAGE, f"{CONTAINER} image", "registry.example/stage", "has neither a tag other than latest nor a digest"),
    (STAGE, f"{CONTAINER} image", "registry.example/stage:latest", "has neither a tag other than latest nor a digest"),
    (STAGE, f"{CONTAINER} image", "registry.example/stage:1@sha256:12", "is not the reference of an image"),
    (STAGE, f"{CONTAINER} env 2", {"name": "HF_TOKEN", "value": "x"}, "HF_TOKEN contains a secret"),
    (STAGE, f"{CONTAINER} args 3", "--token=abc", "contains a secret"),
    ("ServiceAccount/tts-vocoder", "", SECRET, "contains a secret"),
]  # fmt: skip

# Faults that the schemas report, among them each custom resource.
SCHEMA_FAULTS: list[tuple[str, str, Any, str]] = [
    (STAGE, "apiVersion", "apps/v2", "Couldn't find schema for kind Deployment"),
    (STAGE, "spec replicas", "two", "'two' is not of type 'integer'"),
    (STAGE, f"{CONTAINER} imagePullpolicy", "Always", "'imagePullpolicy' was unexpected"),
    (KEDA, "spec triggers 0 metadata serverAddress", REMOVED, "'serverAddress' is a required property"),
    (KEDA, "spec triggers 0 metadata threshold", 5, "5 is not of type 'string'"),
    (KEDA, "spec pollInterval", 5, "'pollInterval' was unexpected"),
    (LWS, "spec leaderWorkerTemplate size", REMOVED, "'size' is a required property"),
    (
        LWS,
        "spec leaderWorkerTemplate workerTemplate spec containers 0 imagePullpolicy",
        "x",
        "'imagePullpolicy' was unex",
    ),
    ("ServiceMonitor/tts", "spec endpoints 0 targetport", 1, "'targetport' was unexpected"),
    ("PrometheusRule/tts", "spec groups 0 rules 0 expr", REMOVED, "'expr' is a required property"),
    ("PrometheusRule/tts", "spec groups 0 rules 0 for", "soon", "'soon' does not match"),
    ("Certificate/tts", "spec issuerRef name", REMOVED, "'name' is a required property"),
]


def sound() -> list[Manifest]:
    # As JSON and back, because an alias of YAML is one object in several places.
    objects: list[Manifest] = json.loads(json.dumps(yaml.safe_load(SOUND)))
    return objects


def with_fault(ref: str, path: str, value: Any) -> Render:
    """Returns the sound objects with another value at one path, which is the whole object if the path is empty."""
    objects = sound()
    changed = select(objects, ref)
    if not path:
        changed.clear()
        changed.update(value)
        return Render(objects, EXISTING)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split()]
    target: Any = changed
    for part in parents:
        target = target[part]
    if value is REMOVED:
        del target[last]
    else:
        target[last] = value
    return Render(objects, EXISTING)


def test_sound_manifests_have_no_problems() -> None:
    assert find_problems(Render(sound(), EXISTING)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_sound_manifests_satisfy_the_schemas(version: str) -> None:
    assert list(check_schemas(Render(sound()), version)) == []


@pytest.mark.parametrize(("ref", "path", "value", "problem"), FAULTS, ids=[fault[3] for fault in FAULTS])
def test_a_seeded_fault_is_found(ref: str, path: str, value: Any, problem: str) -> None:
    problems = find_problems(with_fault(ref, path, value))
    assert any(problem in found for found in problems), problems


@pytest.mark.parametrize(("ref", "path", "value", "problem"), SCHEMA_FAULTS, ids=[fault[3] for fault in SCHEMA_FAULTS])
def test_the_schemas_find_a_seeded_fault(ref: str, path: str, value: Any, problem: str) -> None:
    problems = list(check_schemas(with_fault(ref, path, value), "1.33"))
    assert any(problem in found for found in problems), problems


def test_an_object_that_exists_twice_is_found() -> None:
    objects = sound()
    assert f"{BUDGET}: exists 2 times" in find_problems(Render([*objects, select(objects, BUDGET)], EXISTING))


def test_an_object_of_an_unknown_kind_is_found() -> None:
    unknown = {"apiVersion": "example.org/v1", "kind": "Gadget", "metadata": {"name": "a"}}
    assert "Gadget/a: Couldn't find schema" in next(check_schemas(Render([unknown]), "1.33"))


def test_a_key_that_occurs_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="duplicate key 'name'"):
        load_objects("metadata: {name: a, name: b}")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("500m", "0.5"), ("2Gi", "2147483648"), ("1.5k", "1500"), ("1e3", "1000"), ("4", "4"), ("2GB", None), ("K", None)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, amount: str | None) -> None:
    assert parse_quantity(text) == (amount if amount is None else Decimal(amount))
