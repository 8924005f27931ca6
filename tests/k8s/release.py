"""Renders a release of a small speech pipeline with any values on top."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import yaml

from tests.k8s.helm import render
from tests.k8s.manifests import Manifest, Pod, Render, all_pods, field, pods_of, select, strings_of

# A stage alone, and two stages that share a pod. Each value is valid for every test that changes another one.
SPEECH: dict[str, Any] = {
    "pipeline": {
        "pipeline": "speech",
        "stages": {
            "thinker": {
                "engine": "vllm",
                "model": "smollm2",
                "options": {"dtype": "float32", "seed": 1, "enable_sleep_mode": True},
            },
            "acoustic": {"engine": "function", "function": "hibari.acoustic", "model": "hibari", "group": "voice"},
            "vocoder": {"engine": "function", "function": "hibari.vocoder", "group": "voice"},
        },
        "edges": [
            {"from": "thinker", "to": "acoustic", "transform": "text.sentences"},
            {"from": "acoustic", "to": "vocoder", "connector": "shm"},
        ],
        "outputs": {"text": "thinker", "audio": "vocoder"},
    },
    "stageDefaults": {"modelCache": {"existingClaim": "weights"}},
}
EXTERNAL = {
    "pipeline": {
        "stages": {"vocoder": {"engine": "external", "function": None, "group": None}},
        "edges": [{"from": "thinker", "to": "acoustic"}, {"from": "acoustic", "to": "vocoder", "connector": "grpc"}],
    }
}
NIXL_EDGE = [
    {"from": "thinker", "to": "acoustic", "connector": "nixl"},
    {"from": "acoustic", "to": "vocoder", "connector": "shm"},
]


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the changes: mappings are merged, None removes a key, everything else is replaced."""
    result = dict(base)
    for change in changes:
        for key, value in change.items():
            if value is None:
                result.pop(key, None)
            elif isinstance(value, Mapping):
                result[key] = merged(result.get(key) or {}, value)
            else:
                result[key] = value
    return result


def at(path: str, value: Any) -> dict[str, Any]:
    """Returns nested mappings with one value at a dotted path: at("a.b", 1) is {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


FOLDER = {
    "volumes": [{"name": "media", "persistentVolumeClaim": {"claimName": "media"}}],
    "volumeMounts": [{"name": "media", "mountPath": "/media"}],
}
ISSUER = at("tls", {"enabled": True, "issuer": {"name": "ca"}})
TOKENS = at("tls.tokens.secret", "callers")
GATEWAY = at("gateway.enabled", True)
MEDIA = at("pipeline.media.store", "s3://bucket/media")
JOBS = {**MEDIA, **at("jobs.enabled", True)}
PROMETHEUS = {"address": "http://prometheus.monitoring:9090"}
KEDA = {"enabled": True, "minReplicas": 1, "maxReplicas": 5, "prometheus": PROMETHEUS}
SHARED: dict[str, dict[str, Any]] = {
    "external": EXTERNAL,
    "folder": {**at("pipeline.media.store", "/media"), **dict.fromkeys(("media", "stageDefaults", "jobs"), FOLDER)},
    "fronts": {**MEDIA, **GATEWAY, **at("jobs", {"enabled": True, "databaseSecret": "database"})},
    "gateway": GATEWAY,
    "issuer": ISSUER,
    "jobs": JOBS,
    "keda": at("stages.thinker.autoscaling", KEDA),
    "media": MEDIA,
    "nixl": at("pipeline.edges", NIXL_EDGE),
}
"""Changes that the cases in files of this folder name."""


@functools.cache
def render_once(values: str) -> list[Manifest]:
    """Returns the objects of a release. Tests with equal values share them, and must not change them."""
    return render(json.loads(values))


class Release(Render):
    """The objects of a release with `SPEECH` and changes of it."""

    def __init__(self, *changes: Mapping[str, Any]) -> None:
        values = merged(SPEECH, *changes)
        super().__init__(render_once(json.dumps(values)), strings_of(values))

    def __getitem__(self, ref: str) -> Manifest:
        return select(self.objects, ref)

    def __contains__(self, ref: str) -> bool:
        kind, _, name = ref.partition("/")
        return any(item["metadata"]["name"] == name for item in self.of_kind(kind))

    def pod(self, name: str) -> Pod:
        """Returns the pod template of the Deployment release-NAME."""
        return pods_of(self[f"Deployment/release-{name}"])[0]

    def container(self, name: str) -> Manifest:
        """Returns the container of a stage's serving pods, or of the orchestrator or the media service."""
        serving = [item for item in self.of_kind("Deployment") if not item["metadata"]["name"].endswith("-warm")]
        containers = [container for pod in all_pods(serving) for container in pod.containers]
        (found,) = [container for container in containers if container["name"] == name]
        return found

    def probe_ports(self, name: str) -> set[int]:
        """Returns the ports that the probes of a container ask for the health of gRPC."""
        container = self.container(name)
        return {container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "liveness", "readiness")}

    def env(self, name: str) -> dict[str, str]:
        """Returns the literal environment of a container."""
        return {item["name"]: item["value"] for item in self.container(name).get("env", []) if "value" in item}

    def config(self, front: str = "orchestrator") -> dict[str, Any]:
        """Returns the config of the orchestrators, gateways or job servers."""
        annotation = "config" if front == "orchestrator" else front
        config: dict[str, Any] = json.loads(self.pod(front).annotations[f"stagemesh.dev/{annotation}"])
        return config

    def secrets(self, name: str) -> dict[str, str]:
        """Returns the Secret of each file that a pod has in /etc/stagemesh."""
        sources = field(self.volume(name, "config"), "projected.sources", [])
        secrets = [source["secret"] for source in sources if "secret" in source]
        return {item["path"]: secret["name"] for secret in secrets for item in secret["items"]}

    def pipeline(self, name: str) -> dict[str, Any]:
        """Returns the pipeline file of a pod."""
        pipeline: dict[str, Any] = yaml.safe_load(self.pod(name).annotations["stagemesh.dev/pipeline"])
        return pipeline

    def generation(self) -> str:
        generation: str = self.config()["generation"]
        return generation

    def volume(self, name: str, volume: str) -> Manifest | None:
        """Returns a volume of a pod without its name, or None if the pod does not have it."""
        found = [item for item in self.pod(name).spec["volumes"] if item["name"] == volume]
        return {key: value for key, value in found[0].items() if key != "name"} if found else None

    def value(self, place: str) -> Any:
        """Returns the value at `KIND NAME PATH`, or None if there is none.

        KIND and NAME identify an object, or are a method of this class and its argument: "container thinker image".
        """
        kind, name, *path = place.split()
        if kind == "volume":
            return self.volume(name, *path)
        if kind[0].isupper():
            item: Any = next((each for each in self.of_kind(kind) if each["metadata"]["name"] == name), None)
        else:
            item = getattr(self, kind)(name)
        return field(item._asdict() if isinstance(item, Pod) else item, "".join(path))


def release_of(case: Mapping[str, Any]) -> Release:
    """Returns the release of a case: `with` names changes of `SHARED`, and `values` has further ones by path."""
    changes = [at(path, value) for path, value in case.get("values", {}).items()]
    return Release(*(SHARED[name] for name in case.get("with", [])), *changes)


def settings(item: Manifest, *paths: str) -> list[Any]:
    """Returns the values at several paths of an object."""
    return [field(item, path) for path in paths]
