"""Decides which pods of a Deployment are created and deleted, as the controllers of Kubernetes do."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tests.k8s.manifests import Manifest


class Member(Protocol):
    """A pod, as far as these decisions depend on it."""

    @property
    def created_s(self) -> float: ...
    @property
    def ready(self) -> bool: ...


MemberT = TypeVar("MemberT", bound=Member)


@dataclass
class Deployment:
    """A Deployment and its present number of replicas."""

    manifest: Manifest
    replicas: int

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def template(self) -> Manifest:
        template: Manifest = self.manifest["spec"]["template"]
        return template

    @property
    def revision(self) -> str:
        """The hash of the pod template, which names the ReplicaSet."""
        return hashlib.sha256(json.dumps(self.template, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def min_ready_s(self) -> float:
        return float(self.manifest["spec"].get("minReadySeconds", 0))

    @property
    def max_surge(self) -> int:
        return math.ceil(self._rolling("maxSurge"))

    @property
    def max_unavailable(self) -> int:
        return math.floor(self._rolling("maxUnavailable"))

    def _rolling(self, field: str) -> float:
        value = self.manifest["spec"].get("strategy", {}).get("rollingUpdate", {}).get(field, "25%")
        return value if isinstance(value, int) else self.replicas * int(value.removesuffix("%")) / 100


@dataclass(frozen=True)
class Decision(Generic[MemberT]):
    """The number of pods to create from the present template, and the pods to delete."""

    create: int
    delete: Sequence[MemberT]


def decide(
    deployment: Deployment, *, new: Sequence[MemberT], old: Sequence[MemberT], available: Sequence[MemberT]
) -> Decision[MemberT]:
    """Returns the next step of a Deployment.

    `new` are the pods of the present template, and `old` those of earlier templates, both without terminating pods.
    `available` are the pods of either kind that have been ready for long enough.
    """
    surplus = _least_useful(new)[: max(0, len(new) - deployment.replicas)]
    allowed = deployment.replicas + deployment.max_surge if old else deployment.replicas
    create = max(0, min(deployment.replicas - len(new), allowed - len(new) - len(old)))
    minimum = deployment.replicas - deployment.max_unavailable
    unavailable_old = [pod for pod in old if pod not in available]
    available_old = [pod for pod in _least_useful(old) if pod in available]
    spare = max(0, len(available) - len([pod for pod in surplus if pod in available]) - minimum)
    return Decision(create, [*surplus, *unavailable_old, *available_old[:spare]])


def _least_useful(pods: Sequence[MemberT]) -> list[MemberT]:
    """Returns the pods in the order in which they are deleted: first those that are not ready, then the youngest."""
    return sorted(pods, key=lambda pod: (pod.ready, -pod.created_s))
