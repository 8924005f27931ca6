"""Maps manifests for current Kubernetes to Kubernetes 1.20, as a post-renderer of helm: standard input to output.

- policy/v1 and autoscaling/v2 become the versions that 1.20 has.
- A gRPC probe becomes a command in the container, which asks the same server for the health of the same service. The
  program `probe` is mounted from the node for that.
- Fields that 1.20 does not know are ignored by its API server.
"""

import sys
from typing import Any

import yaml

_VERSIONS = {
    ("policy/v1", "PodDisruptionBudget"): "policy/v1beta1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "autoscaling/v2beta2",
}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_VOLUME = "stagemesh-probe"
_FOLDER = "/opt/stagemesh-probe"
# Starting a program in a container takes longer than the call of a kubelet does.
_START_S = 10


def main(binaries: str) -> None:
    """Maps standard input. `binaries` is the folder of the program `probe` on the nodes."""
    manifests = [manifest for manifest in yaml.safe_load_all(sys.stdin) if manifest]
    for manifest in manifests:
        key = (manifest["apiVersion"], manifest["kind"])
        manifest["apiVersion"] = _VERSIONS.get(key, manifest["apiVersion"])
        if template := manifest.get("spec", {}).get("template"):
            _map_pod(template["spec"], binaries)
    yaml.safe_dump_all(manifests, sys.stdout)


def _map_pod(pod: dict[str, Any], binaries: str) -> None:
    mapped = [container for container in pod["containers"] if _map_probes(container)]
    for container in mapped:
        mount = {"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True}
        container.setdefault("volumeMounts", []).append(mount)
    if mapped:
        pod.setdefault("volumes", []).append({"name": _VOLUME, "hostPath": {"path": binaries, "type": "Directory"}})


def _map_probes(container: dict[str, Any]) -> bool:
    """Returns whether the container has a gRPC probe."""
    probes = [probe for name in _PROBES if (probe := container.get(name)) and "grpc" in probe]
    for probe in probes:
        grpc, timeout_s = probe.pop("grpc"), probe.get("timeoutSeconds", 1)
        address = f"127.0.0.1:{grpc['port']}"
        probe["exec"] = {"command": [f"{_FOLDER}/probe", address, grpc.get("service", ""), f"{timeout_s}s"]}
        probe["timeoutSeconds"] = timeout_s + _START_S
    return bool(probes)


if __name__ == "__main__":
    main(sys.argv[1])
