"""Checks that network policies select pods and ports that exist."""

from collections.abc import Iterator

from tests.k8s.checks.references import ports_of
from tests.k8s.manifests import Manifest, Pod, Render, all_pods, field, matches, reference

_INSTANCE = "app.kubernetes.io/instance"


def check_access(render: Render) -> Iterator[str]:
    """Yields selectors and ports of NetworkPolicies that fit no pod."""
    pods = all_pods(render.objects)
    for item in render.of_kind("NetworkPolicy"):
        spec, where = item["spec"], reference(item)
        selected = [pod for pod in pods if matches(spec["podSelector"], pod.labels)]
        if not selected:
            yield f"{where}: spec.podSelector selects no pod"
        if not spec.get("policyTypes"):
            yield f"{where}: spec.policyTypes is missing"
        for kind in ("Ingress", "Egress"):
            if kind.lower() in spec and kind not in spec.get("policyTypes", []):
                yield f"{where}: spec.{kind.lower()} has no effect without {kind} in spec.policyTypes"
        for rule in spec.get("ingress", []):
            yield from _check_peers(where, rule.get("from", []), pods)
            yield from _check_ports(where, rule, selected)
        for rule in spec.get("egress", []):
            peers = list(_own_pods(rule.get("to", []), pods))
            yield from _check_peers(where, rule.get("to", []), pods)
            yield from _check_ports(where, rule, peers)


def _is_own(peer: Manifest) -> bool:
    return _INSTANCE in field(peer, "podSelector.matchLabels", {}) and "namespaceSelector" not in peer


def _own_pods(peers: list[Manifest], pods: list[Pod]) -> Iterator[Pod]:
    for peer in filter(_is_own, peers):
        yield from (pod for pod in pods if matches(peer["podSelector"], pod.labels))


def _check_peers(where: str, peers: list[Manifest], pods: list[Pod]) -> Iterator[str]:
    for peer in peers:
        if _is_own(peer) and not any(matches(peer["podSelector"], pod.labels) for pod in pods):
            yield f"{where}: the peer {peer['podSelector']} selects no pod"


def _check_ports(where: str, rule: Manifest, pods: list[Pod]) -> Iterator[str]:
    for port in rule.get("ports", []):
        if "protocol" not in port:
            yield f"{where}: port {port.get('port')} has no protocol"
        if "endPort" in port:
            if port["endPort"] < port["port"]:
                yield f"{where}: endPort is below port {port['port']}"
        elif pods and not any(ports_of(pod, port["port"]) for pod in pods):
            yield f"{where}: no selected pod has the port {port['port']!r}"
