"""Answers which pods may connect to which ports under the network policies of a release."""

from ipaddress import ip_address, ip_network
from typing import NamedTuple

from tests.k8s.manifests import Manifest, field, matches


class Endpoint(NamedTuple):
    """A pod in a namespace, by its labels. The namespace of the release is empty. Or a host outside the cluster, by its
    address.
    """

    labels: dict[str, str]
    namespace: str = ""
    address: str = ""


def is_allowed(
    policies: list[Manifest], source: Endpoint, target: Endpoint, *, port: int, protocol: str = "TCP"
) -> bool:
    """Returns whether the egress rules of the source and the ingress rules of the target allow a connection."""
    sides = (("Egress", "to", source, target), ("Ingress", "from", target, source))
    return all(
        any(_is_peer(rule.get(key), peer) and _is_port(rule.get("ports"), port, protocol) for rule in rules)
        for kind, key, pod, peer in sides
        if (rules := _rules(policies, pod, kind)) is not None
    )


def _rules(policies: list[Manifest], pod: Endpoint, kind: str) -> list[Manifest] | None:
    """Returns the rules for a pod, or None if no policy of the kind selects it, so that it may do everything."""
    chosen = [
        item["spec"]
        for item in policies
        if not pod.namespace
        and not pod.address
        and kind in item["spec"]["policyTypes"]
        and matches(item["spec"]["podSelector"], pod.labels)
    ]
    return [rule for spec in chosen for rule in spec.get(kind.lower(), [])] if chosen else None


def _is_peer(peers: list[Manifest] | None, pod: Endpoint) -> bool:
    # An empty list means every peer.
    return not peers or any(_selects(peer, pod) for peer in peers)


def _selects(peer: Manifest, pod: Endpoint) -> bool:
    if "ipBlock" in peer or pod.address:
        block = field(peer, "ipBlock.cidr")
        return bool(block and pod.address) and ip_address(pod.address) in ip_network(block)
    namespaces = peer.get("namespaceSelector")
    own = {"kubernetes.io/metadata.name": pod.namespace}
    in_namespace = not pod.namespace if namespaces is None else matches(namespaces, own)
    return in_namespace and matches(field(peer, "podSelector", {}), pod.labels)


def _is_port(ports: list[Manifest] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        item["protocol"] == protocol and item["port"] <= port <= int(item.get("endPort") or item["port"])
        for item in ports
    )
