"""Finds objects, pods and containers in rendered manifests."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Render:
    """Rendered objects, and the names of objects that already exist in the cluster because the values refer to them."""

    objects: list[Manifest]
    existing: frozenset[str] = frozenset()

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [item for item in self.objects if item["kind"] in kinds]


class Pod(NamedTuple):
    """A pod template, or a pod of its own."""

    owner: Manifest
    path: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Manifest

    @property
    def where(self) -> str:
        return f"{reference(self.owner)}: {self.path}spec"

    @property
    def containers(self) -> list[Manifest]:
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.containers]


# The paths of pod templates by the kind of their owner.
_TEMPLATES = {
    "Pod": ("",),
    "Deployment": ("spec.template.",),
    "StatefulSet": ("spec.template.",),
    "DaemonSet": ("spec.template.",),
    "Job": ("spec.template.",),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.leaderTemplate.", "spec.leaderWorkerTemplate.workerTemplate."),
}
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "LeaderWorkerSet")


def reference(item: Manifest) -> str:
    """Returns `Kind/name`."""
    return f"{item['kind']}/{item['metadata']['name']}"


def select(objects: Iterable[Manifest], ref: str) -> Manifest:
    """Returns the object with the reference `Kind/name`. Raises LookupError if there is none."""
    found = {reference(item): item for item in objects}
    if ref not in found:
        raise LookupError(f"{ref} is not among {', '.join(sorted(found))}")
    return found[ref]


def field(item: Any, path: str, default: Any = None) -> Any:
    """Returns the value at a dotted path, or `default` if a part of the path is missing. Numbers index lists."""
    for part in filter(None, path.split(".")):
        if isinstance(item, list) and int(part) < len(item):
            item = item[int(part)]
        elif isinstance(item, dict) and part in item:
            item = item[part]
        else:
            return default
    return item


def pods_of(item: Manifest) -> list[Pod]:
    """Returns the pod templates of an object."""
    found = []
    for path in _TEMPLATES.get(item["kind"], ()):
        template = field(item, path)
        if template is not None:
            metadata = template.get("metadata", {})
            found.append(Pod(item, path, metadata.get("labels", {}), metadata.get("annotations", {}), template["spec"]))
    return found


def all_pods(objects: Iterable[Manifest]) -> list[Pod]:
    """Returns the pod templates of all objects."""
    return [pod for item in objects for pod in pods_of(item)]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value below `value` with its dotted path, parents first."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, child in items:
        child_path = f"{path}.{key}" if path else str(key)
        yield child_path, child
        yield from walk(child, child_path)


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector (matchLabels and matchExpressions) selects the labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", []):
        value, wanted = labels.get(term["key"]), term.get("values", [])
        matched = {
            "In": value in wanted,
            "NotIn": value not in wanted,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not matched[term["operator"]]:
            return False
    return True


def strings_of(value: Any) -> frozenset[str]:
    """Returns every string in a value."""
    return frozenset(child for _, child in walk(value) if isinstance(child, str))
