"""Checks requests, limits and memory-backed volumes."""

from collections.abc import Iterator
from decimal import Decimal

from tests.k8s.checks.scalars import parse_quantity
from tests.k8s.manifests import Manifest, Pod, Render, all_pods, field


def check_resources(render: Render) -> Iterator[str]:
    """Yields requests above limits, malformed extended resources, and volumes beyond the pod's memory."""
    for pod in all_pods(render.objects):
        for container in pod.all_containers:
            where = f"{pod.where}.containers[{container['name']}].resources"
            resources = container.get("resources", {})
            yield from _check_limits(where, resources.get("requests", {}), resources.get("limits", {}))
        yield from _check_memory_volumes(pod)


def _check_limits(where: str, requests: Manifest, limits: Manifest) -> Iterator[str]:
    for name, value in requests.items():
        requested, limit = parse_quantity(value), parse_quantity(limits.get(name, value))
        if requested is not None and limit is not None and requested > limit:
            yield f"{where}: the request of {name} ({value}) is above its limit ({limits[name]})"
        if "/" in name and name not in limits:
            yield f"{where}: {name} has a request without a limit"
    for name, value in [*requests.items(), *limits.items()]:
        amount = parse_quantity(value)
        if "/" in name and not isinstance(value, str):
            yield f"{where}: the amount of {name} is not quoted"
        if "/" in name and amount is not None and amount % 1:
            yield f"{where}: the amount of {name} is not a whole number"
        if name in {"memory", "ephemeral-storage"} and str(value).endswith("m"):
            yield f"{where}: {value} of {name} is a fraction of a byte"
    for name in limits.keys() & requests.keys():
        if "/" in name and parse_quantity(limits[name]) != parse_quantity(requests[name]):
            yield f"{where}: the request of {name} differs from its limit"


def _check_memory_volumes(pod: Pod) -> Iterator[str]:
    limits = [parse_quantity(field(item, "resources.limits.memory", "0")) or Decimal(0) for item in pod.containers]
    if not all(limits):
        return
    for volume in pod.spec.get("volumes", []):
        if field(volume, "emptyDir.medium") != "Memory":
            continue
        size = parse_quantity(field(volume, "emptyDir.sizeLimit", ""))
        if size is None:
            yield f"{pod.where}.volumes[{volume['name']}]: is in memory without a sizeLimit"
        elif size > sum(limits):
            yield f"{pod.where}.volumes[{volume['name']}]: its size is above the memory limits of all containers"
