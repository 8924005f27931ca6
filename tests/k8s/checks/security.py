"""Checks the restricted Pod Security Standard, a read-only root, image references, and that no secret is inline."""

import re
from collections.abc import Iterator

from tests.k8s.manifests import Manifest, Pod, Render, all_pods, field, reference, walk

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
# Pinned memory for RDMA. docs/kubernetes.md says why it is outside of the restricted standard.
_CAPABILITIES = {"IPC_LOCK"}
_IMAGE = re.compile(r"[^\s:@]+(:\d+/[^\s:@]+)?(?P<tag>:[\w][\w.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?")
_SECRET_NAME = re.compile(r"(?i)(password|passwd|secret|token|api_?key|credential|private_?key)")
_SECRET_TEXT = re.compile(
    r"(?i)\b(password|secret|token|api_?key)\s*[=:]\s*\S+|\bhf_\w{20,}|\bAKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def check_security(render: Render) -> Iterator[str]:
    """Yields violations. A volume of the host is allowed read-only, if the values contain its path."""
    for pod in all_pods(render.objects):
        yield from _check_pod(pod, render.existing)
        for container in pod.all_containers:
            where = f"{pod.where}.containers[{container['name']}]"
            yield from _check_container(where, container, pod)
            yield from _check_image(where, container["image"])
            yield from _check_inline(where, container)
    for item in render.objects:
        if item["kind"] == "Secret" and (item.get("data") or item.get("stringData")):
            yield f"{reference(item)}: contains a secret; refer to an existing one"
        for path, value in walk(item):
            if isinstance(value, str) and _SECRET_TEXT.search(value):
                yield f"{reference(item)}: {path} contains a secret"


def _check_pod(pod: Pod, existing: frozenset[str]) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if pod.spec.get(key):
            yield f"{pod.where}.{key} is true"
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield f"{pod.where}.automountServiceAccountToken is not false"
    mounts = [mount for container in pod.all_containers for mount in container.get("volumeMounts", [])]
    for volume in pod.spec.get("volumes", []):
        is_read_only = all(mount.get("readOnly") for mount in mounts if mount["name"] == volume["name"])
        for source in volume.keys() - {"name"} - _VOLUMES:
            is_given = source == "hostPath" and volume[source]["path"] in existing
            if not is_given or not is_read_only:
                yield f"{pod.where}.volumes[{volume['name']}]: {source} is not allowed"


def _check_container(where: str, container: Manifest, pod: Pod) -> Iterator[str]:
    own, shared = container.get("securityContext", {}), pod.spec.get("securityContext", {})

    def setting(path: str) -> object:
        return field(own, path, field(shared, path))

    required = {
        "runAsNonRoot is not true": setting("runAsNonRoot") is True,
        "runs as root": 0 not in {setting("runAsUser"), setting("runAsGroup")},
        "seccompProfile.type is not RuntimeDefault": setting("seccompProfile.type") in {"RuntimeDefault", "Localhost"},
        "allowPrivilegeEscalation is not false": own.get("allowPrivilegeEscalation") is False,
        "is privileged": not own.get("privileged"),
        "readOnlyRootFilesystem is not true": own.get("readOnlyRootFilesystem") is True,
        "does not drop all capabilities": field(own, "capabilities.drop") == ["ALL"],
    }
    yield from (f"{where}: {problem}" for problem, is_met in required.items() if not is_met)
    for capability in field(own, "capabilities.add", []):
        if capability not in _CAPABILITIES:
            yield f"{where}: adds the capability {capability}"


def _check_image(where: str, image: str) -> Iterator[str]:
    parts = _IMAGE.fullmatch(image)
    if parts is None:
        yield f"{where}: {image!r} is not the reference of an image"
    elif not parts["digest"] and parts["tag"] in {None, ":latest"}:
        yield f"{where}: {image!r} has neither a tag other than latest nor a digest"


def _check_inline(where: str, container: Manifest) -> Iterator[str]:
    for variable in container.get("env", []):
        if _SECRET_NAME.search(variable["name"]) and variable.get("value"):
            yield f"{where}.env: {variable['name']} contains a secret; use valueFrom.secretKeyRef"
