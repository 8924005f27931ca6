"""Checks that what an object refers to exists: pods, ports, workloads, and objects by name."""

from collections.abc import Iterator

from tests.k8s.checks.containers import check_port_number
from tests.k8s.manifests import WORKLOADS, Manifest, Pod, Render, all_pods, field, matches, pods_of, reference, walk


def check_references(render: Render) -> Iterator[str]:
    """Yields selectors, targets, ports and names that refer to nothing, or to too much."""
    pods = all_pods(render.objects)
    yield from _check_workloads(render)
    for item in render.of_kind("Service"):
        yield from _check_service(item, pods)
    for item in render.of_kind("Ingress"):
        yield from _check_ingress(item, render)
    for item in render.of_kind("PodDisruptionBudget"):
        yield from _check_budget(item, pods)
    yield from _check_autoscalers(render)
    for item in render.of_kind("ServiceMonitor", "PodMonitor"):
        yield from _check_monitor(item, render)
    for pod in pods:
        yield from _check_names(pod, render)


def _check_workloads(render: Render) -> Iterator[str]:
    for item in render.of_kind("Deployment", "StatefulSet", "DaemonSet"):
        selector = field(item, "spec.selector", {})
        if not selector.get("matchLabels"):
            yield f"{reference(item)}: spec.selector is empty"
        for other in render.objects:
            selected = any(matches(selector, pod.labels) for pod in pods_of(other))
            if selected and other is not item:
                yield f"{reference(item)}: spec.selector also selects pods of {reference(other)}"
            if not selected and other is item:
                yield f"{reference(item)}: spec.selector does not select its own pods"


def _check_service(item: Manifest, pods: list[Pod]) -> Iterator[str]:
    ports = field(item, "spec.ports", [])
    names = [port.get("name") for port in ports]
    if len(set(names)) != len(names) or (len(names) > 1 and None in names):
        yield f"{reference(item)}: spec.ports need different names"
    for port in ports:
        yield from check_port_number(f"{reference(item)}: spec.ports", port["port"])
        if "protocol" not in port:
            yield f"{reference(item)}: port {port['port']} has no protocol"
    if field(item, "spec.type") == "ExternalName":
        return
    selector = field(item, "spec.selector", {})
    selected = [pod for pod in pods if selector and matches({"matchLabels": selector}, pod.labels)]
    if not selected:
        yield f"{reference(item)}: spec.selector selects no pod"
    for pod in selected:
        if pod.owner["kind"] not in WORKLOADS:
            yield f"{reference(item)}: spec.selector selects {reference(pod.owner)}"
        for port in ports:
            target = port.get("targetPort", port["port"])
            if len(ports_of(pod, target)) != 1:
                yield f"{reference(item)}: {reference(pod.owner)} has {len(ports_of(pod, target))} ports {target!r}"


def _check_ingress(item: Manifest, render: Render) -> Iterator[str]:
    services = {other["metadata"]["name"]: other["spec"]["ports"] for other in render.of_kind("Service")}
    for rule in field(item, "spec.rules", []):
        for path in rule["http"]["paths"]:
            service = path["backend"]["service"]
            if service["port"]["name"] not in [port.get("name") for port in services.get(service["name"], ())]:
                yield f"{reference(item)}: Service/{service['name']} has no port {service['port']['name']!r}"
    for entry in field(item, "spec.tls", []):
        yield from _check_exists(f"{reference(item)}: spec.tls", "Secret", entry["secretName"], render)


def ports_of(pod: Pod, target: object) -> list[int]:
    """Returns the numbers of the pod's ports that a name or a number means."""
    ports = [port for container in pod.containers for port in container.get("ports", [])]
    return [port["containerPort"] for port in ports if target in {port["containerPort"], port.get("name")}]


def _check_budget(item: Manifest, pods: list[Pod]) -> Iterator[str]:
    owners = {reference(pod.owner) for pod in pods if matches(field(item, "spec.selector", {}), pod.labels)}
    if len(owners) != 1:
        yield f"{reference(item)}: spec.selector selects pods of {len(owners)} workloads: {', '.join(sorted(owners))}"
    if ("minAvailable" in item["spec"]) == ("maxUnavailable" in item["spec"]):
        yield f"{reference(item)}: needs either minAvailable or maxUnavailable"


def _check_autoscalers(render: Render) -> Iterator[str]:
    targets = []
    for item in render.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = field(item, "spec.scaleTargetRef", {})
        ref = f"{target.get('kind', 'Deployment')}/{target.get('name')}"
        targets.append(ref)
        found = [other for other in render.objects if reference(other) == ref]
        if not found:
            yield f"{reference(item)}: spec.scaleTargetRef: {ref} does not exist"
        if any("replicas" in other["spec"] for other in found):
            yield f"{ref}: spec.replicas belongs to {reference(item)}"
        unit = "Replicas" if item["kind"] == "HorizontalPodAutoscaler" else "ReplicaCount"
        low, high = f"min{unit}", f"max{unit}"
        if field(item, f"spec.{low}", 1) > field(item, f"spec.{high}", 100):
            yield f"{reference(item)}: spec.{low} is above spec.{high}"
    yield from (f"{ref}: has two autoscalers" for ref in set(targets) if targets.count(ref) > 1)
    for item in render.of_kind("Deployment", "LeaderWorkerSet"):
        if reference(item) not in targets and "replicas" not in item["spec"]:
            yield f"{reference(item)}: has neither spec.replicas nor an autoscaler"


def _check_monitor(item: Manifest, render: Render) -> Iterator[str]:
    selector = item["spec"]["selector"]
    if item["kind"] == "ServiceMonitor":
        selected = [each for each in render.of_kind("Service") if matches(selector, field(each, "metadata.labels", {}))]
        ports = [{port.get("name") for port in field(each, "spec.ports", [])} for each in selected]
        endpoints = field(item, "spec.endpoints", [])
    else:
        pods = [pod for pod in all_pods(render.objects) if matches(selector, pod.labels)]
        ports = [{port.get("name") for one in pod.containers for port in one.get("ports", [])} for pod in pods]
        endpoints = field(item, "spec.podMetricsEndpoints", [])
    if not ports:
        yield f"{reference(item)}: spec.selector selects nothing"
    for endpoint in endpoints:
        if not any(endpoint["port"] in names for names in ports):
            yield f"{reference(item)}: nothing that it selects has a port {endpoint['port']!r}"


# The field that names an object, by the kind of the object.
_NAMED = (
    ("ConfigMap", ("configMap", "configMapRef", "configMapKeyRef")),
    ("Secret", ("secret", "secretRef", "secretKeyRef")),
    ("PersistentVolumeClaim", ("persistentVolumeClaim",)),
)


def _check_names(pod: Pod, render: Render) -> Iterator[str]:
    for path, value in walk(pod.spec):
        for kind, keys in _NAMED:
            if path.rpartition(".")[2] in keys and isinstance(value, dict):
                name = value.get("name") or value.get("secretName") or value.get("claimName")
                yield from _check_exists(f"{pod.where}.{path}", kind, name, render)
    account = pod.spec.get("serviceAccountName", "default")
    if account != "default":
        yield from _check_exists(f"{pod.where}.serviceAccountName", "ServiceAccount", account, render)


def _check_exists(where: str, kind: str, name: str | None, render: Render) -> Iterator[str]:
    made = {reference(item) for item in render.objects}
    if kind == "Secret":
        # cert-manager makes the secret of a Certificate.
        made |= {f"Secret/{field(item, 'spec.secretName')}" for item in render.of_kind("Certificate")}
    if f"{kind}/{name}" not in made and name not in render.existing:
        yield f"{where}: {kind}/{name} does not exist"
