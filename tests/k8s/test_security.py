"""Connections between pods, and the rights of a pod."""

import contextvars
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import PermissionDeniedError
from stagemesh.rpc.callers import check_replica, identity_of_certificate, set_identity
from tests.k8s.helm import read_values
from tests.k8s.manifests import all_pods, pods_of
from tests.k8s.network import Endpoint, is_allowed
from tests.k8s.release import EXTERNAL, ISSUER, MEDIA, Release, at, release_of

CONNECTIONS = read_values(Path(__file__).with_name("connections.yaml"))


class Network:
    """The pods and policies of a release, and some pods outside of it."""

    def __init__(self, release: Release) -> None:
        self.policies = release.of_kind("NetworkPolicy")
        self.pods = {
            "client": Endpoint({"app": "client"}),
            "foreign client": Endpoint({"app": "client"}, "other"),
            "prometheus": Endpoint({"app": "prometheus"}, "monitoring"),
            "dns": Endpoint({"k8s-app": "kube-dns"}, "kube-system"),
            "other release": Endpoint({**release.pod("thinker").labels, "app.kubernetes.io/instance": "other"}),
            "test": Endpoint(pods_of(release["Pod/release-test"])[0].labels),
            **{
                item["metadata"]["name"].removeprefix("release-"): Endpoint(pods_of(item)[0].labels)
                for item in release.of_kind("Deployment")
            },
        }

    def allows(self, source: str | Endpoint, target: str | Endpoint, *, port: int, protocol: str = "TCP") -> bool:
        """Returns whether one pod, or host outside the cluster, may connect to another one."""
        ends = [self.pods[each] if isinstance(each, str) else each for each in (source, target)]
        return is_allowed(self.policies, *ends, port=port, protocol=protocol)

    def sources(self, place: str) -> set[str]:
        """Returns the pods that may connect to a pod and port, for example "orchestrator 7780"."""
        target, port = place.split()
        return {name for name in self.pods if self.allows(name, target, port=int(port))}


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(Release())


@pytest.mark.parametrize("name", CONNECTIONS)
def test_pods_reach_a_port_if_the_policies_allow_it(name: str) -> None:
    case = CONNECTIONS[name]
    network = Network(release_of(case))
    for place, names in case.get("exactly", {}).items():
        assert network.sources(place) == set(names), place
    for place, names in case.get("among", {}).items():
        sources = network.sources(place)
        assert set(names) <= sources, place
        assert not set(case["never"]) & sources, place


def test_pods_resolve_names(network: Network) -> None:
    for name in ("orchestrator", "thinker", "voice"):
        assert network.allows(name, "dns", port=53, protocol="UDP")


def test_pods_connect_to_nothing_else(network: Network) -> None:
    anywhere = Endpoint({}, "other")
    for name in ("orchestrator", "thinker", "voice"):
        assert not network.allows(name, anywhere, port=443)


@pytest.mark.parametrize(
    ("host", "collectors"),
    [
        ("collector", {"own"}),
        ("collector.tracing", {"tracing"}),
        ("collector.tracing.svc", {"tracing"}),
        ("collector.tracing.svc.cluster.local", {"tracing"}),
        ("10.9.8.7", {"10.9.8.7"}),
        ("[2001:db8::7]", {"2001:db8::7"}),
    ],
)
def test_pods_export_traces_to_the_collector_alone(host: str, collectors: set[str]) -> None:
    release = Release(at("gateway.enabled", True), MEDIA, at("otlp.endpoint", f"http://{host}:4317"))
    network = Network(release)
    endpoints = {
        "own": Endpoint({"app": "collector"}),
        "tracing": Endpoint({"app": "collector"}, "tracing"),
        "other": Endpoint({"app": "collector"}, "other"),
        **{
            address: Endpoint({}, address=address) for address in ("10.9.8.7", "10.9.8.8", "2001:db8::7", "2001:db8::8")
        },
    }
    for name in ("orchestrator", "thinker", "voice", "media", "gateway"):
        assert {peer for peer, end in endpoints.items() if network.allows(name, end, port=4317)} == collectors
        assert not any(network.allows(name, end, port=443) for end in endpoints.values())


def test_a_collector_outside_the_cluster_is_named_by_its_peers() -> None:
    release = Release(
        at("otlp.endpoint", "https://otlp.example.org"),
        at("networkPolicy.collector", [{"ipBlock": {"cidr": "192.0.2.0/24"}}]),
    )
    network = Network(release)
    assert network.allows("thinker", Endpoint({}, address="192.0.2.9"), port=443)
    assert not network.allows("thinker", Endpoint({}, address="198.51.100.9"), port=443)


def test_all_scratch_volumes_have_a_size() -> None:
    release = Release(MEDIA, at("gateway.enabled", True), at("jobs.enabled", True), at("scratch.home", "3Gi"))
    volumes = [volume for pod in all_pods(release.objects) for volume in pod.spec["volumes"] if "emptyDir" in volume]
    assert {volume["name"] for volume in volumes} == {"tmp", "home", "shm"}
    assert all(volume["emptyDir"]["sizeLimit"] for volume in volumes)
    assert {volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "home"} == {"3Gi"}


def test_an_external_stage_exchanges_data_with_stages_and_orchestrators() -> None:
    release = Release(
        EXTERNAL,
        at("stages.vocoder.external", {"service": "sampler", "port": 6000}),
        at("networkPolicy.externalStages", [{"podSelector": {"matchLabels": {"app": "client"}}}]),
    )
    network = Network(release)
    client = network.pods["client"]
    assert all(network.allows(name, client, port=6000) for name in ("orchestrator", "voice"))
    assert network.allows(client, "voice", port=50051)


@pytest.mark.parametrize("address", ["10.9.8.7", "2001:db8::7"])
def test_an_external_stage_at_an_address_of_the_pipeline_exchanges_data_with_stages(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    network = Network(Release(EXTERNAL, at("pipeline.stages.vocoder.addresses", [f"{host}:6000"])))
    outside = Endpoint({}, address=address)
    for name in ("orchestrator", "voice"):
        assert network.allows(name, outside, port=6000)
        assert not network.allows(name, outside, port=6001)
        assert not network.allows(name, "client", port=6000)
    assert network.allows(outside, "voice", port=50_051)


def test_an_external_stage_at_a_name_of_the_pipeline_is_a_peer_that_the_values_select() -> None:
    peers = [{"ipBlock": {"cidr": "10.9.8.0/24"}}]
    release = Release(
        EXTERNAL,
        at("pipeline.stages.vocoder.addresses", ["vocoder.example.com:6000"]),
        at("networkPolicy.externalStages", peers),
    )
    network = Network(release)
    outside = Endpoint({}, address="10.9.8.7")
    for name in ("orchestrator", "voice"):
        assert network.allows(name, outside, port=6000)
    assert network.allows(outside, "voice", port=50_051)


def test_an_empty_list_of_peers_permits_none() -> None:
    release = Release(
        EXTERNAL,
        at("stages.vocoder.external", {"service": "sampler", "port": 6000}),
        MEDIA,
        at("networkPolicy", {"clients": [], "dns": [], "externalStages": [], "operators": []}),
    )
    network = Network(release)
    assert network.sources("orchestrator 7780") == network.sources("media 7790") == {"test"}
    assert network.sources("voice 50051") == {"orchestrator", "thinker", "voice"}
    for name in ("orchestrator", "voice", "media"):
        assert not network.allows(name, "dns", port=53, protocol="UDP")
        assert not network.allows(name, "client", port=6000)


def test_policies_can_be_turned_off() -> None:
    assert not Release(at("networkPolicy.enabled", False)).of_kind("NetworkPolicy")


def test_no_role_is_created() -> None:
    assert not Release().of_kind("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret")


def test_every_pod_runs_as_the_same_user_who_is_not_root() -> None:
    for pod in all_pods(Release(MEDIA).objects):
        context = pod.spec["securityContext"]
        assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}


def test_the_root_is_read_only_and_scratch_folders_are_volumes() -> None:
    release = Release()
    for name in ("orchestrator", "thinker", "vocoder"):
        container = release.container(name)
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert (mounts["/tmp"], mounts["/var/lib/stagemesh"], mounts["/etc/stagemesh"]) == (False, False, True)


def test_cert_manager_makes_a_certificate_for_each_service() -> None:
    release = Release(at("tls", {"enabled": True, "issuer": {"name": "ca", "kind": "ClusterIssuer"}}))
    certificates = {item["metadata"]["name"]: item["spec"] for item in release.of_kind("Certificate")}
    names = [name for spec in certificates.values() for name in spec.get("dnsNames", [])]
    assert all(spec["issuerRef"]["kind"] == "ClusterIssuer" for spec in certificates.values())
    for service in ("orchestrator", "thinker", "acoustic", "vocoder"):
        assert f"release-{service}.models.svc.cluster.local" in names
    assert {name.removeprefix("release-"): spec["uris"] for name, spec in certificates.items()} == {
        "orchestrator": ["stagemesh://orchestrator/release"],
        "test": ["stagemesh://client/release"],
        "thinker": ["stagemesh://stage/thinker/release-thinker-*-*"],
        "voice": [
            "stagemesh://stage/acoustic/release-voice-*-*-acoustic",
            "stagemesh://stage/vocoder/release-voice-*-*-vocoder",
        ],
    }


_LONG = "a" * 40
_PODS = {
    "warm": (at("stages.thinker.warm.replicas", 1), "release-thinker-warm-7d9f8c5b6-x2v4k"),
    "nodes": (
        {**at("stages.thinker.multiNode.nodes", 2), **at("pipeline.stages.thinker.insecure_tcp", True)},
        "release-thinker-3",
    ),
    "a long name": (at("fullnameOverride", _LONG), f"{_LONG}-thinker-7d9f8c5b6x2v4k"),
    "the longest name": (at("fullnameOverride", _LONG + "b" * 10), f"{_LONG}{'b' * 10}-thinkerx2v4k"),
}


@pytest.mark.parametrize(("values", "pod"), _PODS.values(), ids=_PODS)
def test_a_certificate_names_the_pods_of_its_group(values: dict[str, Any], pod: str) -> None:
    assert _may_register(Release(ISSUER, values), "thinker", pod)


@pytest.mark.parametrize(
    ("group", "stage", "pod"),
    [
        ("omni", "thinker", "release-omni-private-7d9f8c5b6-x2v4k-acoustic"),
        ("omni", "acoustic", "release-omni-7d9f8c5b6-x2v4k"),
        ("omni-private", "acoustic", "release-omni-7d9f8c5b6-x2v4k"),
        ("omni-private", "acoustic", "release-omni-private-7d9f8c5b6-x2v4k-vocoder"),
    ],
)
def test_a_certificate_names_no_pod_of_another_group(group: str, stage: str, pod: str) -> None:
    groups = {"thinker": "omni", "acoustic": "omni-private", "vocoder": "omni-private"}
    release = Release(ISSUER, *(at(f"pipeline.stages.{name}.group", value) for name, value in groups.items()))
    assert not _may_register(release, stage, pod, group=group)


def _may_register(release: Release, stage: str, replica: str, *, group: str = "thinker") -> bool:
    """Returns whether the certificate of a group permits its owner to register as a replica of a stage."""
    (spec,) = [
        each["spec"] for each in release.of_kind("Certificate") if each["metadata"]["name"].endswith(f"-{group}")
    ]
    identity = identity_of_certificate({"peer_uri": [uri.encode() for uri in spec["uris"]]})
    assert identity is not None
    context = contextvars.copy_context()
    context.run(set_identity, identity)
    try:
        context.run(check_replica, replica, stage=stage)
    except PermissionDeniedError:
        return False
    return True


def test_probes_have_a_port_without_tls() -> None:
    release = Release(ISSUER)
    config = release.config()
    assert (config["tls"], config["health_listen"]) == ("/etc/stagemesh/tls", "0.0.0.0:7782")
    for name in ("thinker", "acoustic", "vocoder"):
        container = release.container(name)
        (port,) = release.probe_ports(name)
        assert f"--health-listen=0.0.0.0:{port}" in container["args"]
        assert "--tls=/etc/stagemesh/tls" in container["args"]
        assert f"--listen=0.0.0.0:{port}" not in container["args"]


def test_a_release_with_tls_has_another_topology() -> None:
    topologies = {release.generation().partition("-")[0] for release in (Release(), Release(ISSUER))}
    assert len(topologies) == 2


def test_without_tls_no_certificate_is_mounted() -> None:
    assert "secret" not in str(Release().volume("voice", "config"))
