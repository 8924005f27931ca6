"""Checks containers with their ports, probes, volumes and environment."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.k8s.checks.metadata import DNS_LABEL
from tests.k8s.manifests import Manifest, Pod, Render, all_pods, field

_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERRED_VARIABLE = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_DOWNWARD = re.compile(
    r"metadata\.(name|namespace|uid|labels\['.+'\]|annotations\['.+'\])"
    r"|(spec\.(nodeName|serviceAccountName)|status\.(hostIP|hostIPs|podIP|podIPs))"
)
# The kubelet sets these only in the environment, not in files.
_ONLY_IN_ENVIRONMENT = ("spec.", "status.")
_SET_BY_LEADER_WORKER_SET = {"LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_HANDLERS = ("grpc", "httpGet", "tcpSocket", "exec")


def check_containers(render: Render) -> Iterator[str]:
    """Yields faults inside pod templates."""
    for pod in all_pods(render.objects):
        yield from _repeated(f"{pod.where}.containers", "name", [item["name"] for item in pod.all_containers])
        yield from _check_ports(pod)
        yield from _check_volumes(pod)
        for container in pod.all_containers:
            where = f"{pod.where}.containers[{container['name']}]"
            if not DNS_LABEL.fullmatch(container["name"]):
                yield f"{where}: the name is not a DNS label"
            yield from _check_probes(where, container)
            yield from _check_mounts(where, container, pod.spec.get("volumes", []))
            yield from _check_environment(where, container, pod)


def _repeated(where: str, what: str, values: Iterable[Any]) -> Iterator[str]:
    seen = list(values)
    yield from (f"{where}: {what} {value!r} occurs twice" for value in set(seen) if seen.count(value) > 1)


def _check_ports(pod: Pod) -> Iterator[str]:
    numbers = []
    for container in pod.all_containers:
        where = f"{pod.where}.containers[{container['name']}].ports"
        ports = container.get("ports", [])
        for port in ports:
            numbers.append((port["containerPort"], port.get("protocol")))
            yield from check_port_number(where, port["containerPort"])
            if "protocol" not in port:
                yield f"{where}: port {port['containerPort']} has no protocol"
            if "hostPort" in port:
                yield f"{where}: port {port['containerPort']} occupies a port of the host"
            if not _PORT_NAME.fullmatch(port.get("name", "")):
                yield f"{where}: {port.get('name')!r} is not the name of a port (at most 15 characters, a-z, 0-9 and -)"
        yield from _repeated(where, "name", [port.get("name") for port in ports])
    yield from _repeated(f"{pod.where}.containers.ports", "port", numbers)


def check_port_number(where: str, number: object) -> Iterator[str]:
    """Yields a problem if `number` is not the number of a port."""
    if not isinstance(number, int) or not 1 <= number <= 65535:
        yield f"{where}: {number!r} is not a port from 1 to 65535"


def _check_probes(where: str, container: Manifest) -> Iterator[str]:
    numbers = {port["containerPort"] for port in container.get("ports", [])}
    names = {port.get("name") for port in container.get("ports", [])}
    for name in _PROBES:
        probe = container.get(name)
        if probe is None:
            continue
        handlers = [key for key in _HANDLERS if key in probe]
        if len(handlers) != 1:
            yield f"{where}.{name}: has {len(handlers)} handlers"
            continue
        port = field(probe, f"{handlers[0]}.port")
        if handlers[0] != "exec" and port not in (numbers if handlers[0] == "grpc" else numbers | names):
            yield f"{where}.{name}: the container has no port {port!r}"
        if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            yield f"{where}.{name}: successThreshold is not 1"
        for key in ("periodSeconds", "timeoutSeconds", "failureThreshold"):
            if probe.get(key, 1) < 1:
                yield f"{where}.{name}: {key} is less than 1"


def _check_volumes(pod: Pod) -> Iterator[str]:
    volumes = pod.spec.get("volumes", [])
    yield from _repeated(f"{pod.where}.volumes", "name", [volume["name"] for volume in volumes])
    mounted = {mount["name"] for container in pod.all_containers for mount in container.get("volumeMounts", [])}
    for volume in volumes:
        where = f"{pod.where}.volumes[{volume['name']}]"
        if len(volume) != 2:
            yield f"{where}: has {len(volume) - 1} sources"
        if volume["name"] not in mounted:
            yield f"{where}: no container mounts it"
        items = field(volume, "downwardAPI.items", [])
        yield from _repeated(where, "path", [item["path"] for item in items])
        for item in items:
            if source := field(item, "fieldRef.fieldPath"):
                yield from _check_downward(where, source, pod, in_file=True)


def _check_mounts(where: str, container: Manifest, volumes: list[Manifest]) -> Iterator[str]:
    mounts = container.get("volumeMounts", [])
    names = {volume["name"] for volume in volumes}
    yield from _repeated(f"{where}.volumeMounts", "mountPath", [mount["mountPath"].rstrip("/") for mount in mounts])
    for mount in mounts:
        if mount["name"] not in names:
            yield f"{where}.volumeMounts: the pod has no volume {mount['name']!r}"
        if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
            yield f"{where}.volumeMounts: {mount['mountPath']!r} is not an absolute path without a colon"


def _check_environment(where: str, container: Manifest, pod: Pod) -> Iterator[str]:
    variables = container.get("env", [])
    yield from _repeated(f"{where}.env", "variable", [variable["name"] for variable in variables])
    for variable in variables:
        name = variable["name"]
        if not _VARIABLE.fullmatch(name):
            yield f"{where}.env: {name!r} is not the name of a variable"
        if "value" in variable and "valueFrom" in variable:
            yield f"{where}.env: {name} has both value and valueFrom"
        if "value" in variable and not isinstance(variable["value"], str):
            yield f"{where}.env: the value of {name} is not a string"
        if source := field(variable, "valueFrom.fieldRef.fieldPath"):
            yield from _check_downward(f"{where}.env: {name}", source, pod, in_file=False)
    known = {variable["name"] for variable in variables}
    if pod.owner["kind"] == "LeaderWorkerSet":
        known |= _SET_BY_LEADER_WORKER_SET
    for text in [*container.get("args", []), *container.get("command", [])]:
        for name in _REFERRED_VARIABLE.findall(text):
            if name not in known:
                yield f"{where}.args: $({name}) is not a variable of the container"


def _check_downward(where: str, source: str, pod: Pod, *, in_file: bool) -> Iterator[str]:
    if not _DOWNWARD.fullmatch(source) or (in_file and source.startswith(_ONLY_IN_ENVIRONMENT)):
        yield f"{where}: {source!r} is not a field that the downward API offers here"
    for kind, keys in (("annotations", pod.annotations), ("labels", pod.labels)):
        key = re.fullmatch(rf"metadata\.{kind}\['(.+)'\]", source)
        if key and key[1] not in keys:
            yield f"{where}: the pod has no {kind[:-1]} {key[1]!r}"
