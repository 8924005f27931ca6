"""The fields of a pod that its containers see: variables, arguments, and files of the downward API."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.k8s.manifests import Manifest

_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")


@dataclass(frozen=True)
class PodFacts:
    """The fields of a pod that the downward API serves."""

    name: str
    namespace: str
    uid: str
    ip: str
    node: str
    metadata: Manifest

    def field(self, path: str) -> str:
        """Returns the value of a `fieldPath`."""
        if keyed := _KEYED.fullmatch(path):
            return str(self.metadata.get(keyed[1], {}).get(keyed[2], ""))
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "status.hostIP": self.node,
            "status.podIP": self.ip,
        }
        return fields[path]


def environment(container: Manifest, facts: PodFacts) -> dict[str, str]:
    """Returns the variables of a container, in the order in which each may refer to earlier ones."""
    assert "envFrom" not in container, "envFrom is not supported here"
    made = dict[str, str]()
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            made[entry["name"]] = facts.field(entry["valueFrom"]["fieldRef"]["fieldPath"])
        else:
            made[entry["name"]] = expand(entry.get("value", ""), made)
    return made


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces each $(NAME) of a known variable. $$ stands for a dollar sign."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return _REFERENCE.sub(replace, text)


def downward_files(items: Sequence[Manifest], facts: PodFacts) -> dict[str, str]:
    """Returns the files of a downwardAPI volume by their paths."""
    return {item["path"]: facts.field(item["fieldRef"]["fieldPath"]) for item in items}


def port_number(containers: Sequence[Manifest], port: str | int) -> int:
    """Returns the number of a container port, which may be given by its name."""
    if isinstance(port, int):
        return port
    named = [each for container in containers for each in container.get("ports", []) if each.get("name") == port]
    assert len(named) == 1, f"{len(named)} ports of the pod are named {port}"
    return int(named[0]["containerPort"])
