"""Connections between pods, and the rights of a pod."""

import pytest

from tests.k8s.manifests import all_pods, pods_of
from tests.k8s.network import Endpoint, is_allowed
from tests.k8s.release import EXTERNAL, Release, at
from tests.k8s.test_stage_settings import NIXL_EDGE

ADMIN, CLIENTS, METRICS = 7781, 7780, 9464
UCX = 18_620
PORTS = [at("stages", {"thinker": {"port": 40_000}, "acoustic": {"port": 40_001}, "vocoder": {"port": 40_003}})]
TLS_SECRETS = {"orchestrator": "tls-o", "stages": "tls-s", "media": "tls-m", "test": "tls-t"}


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

    def sources(self, target: str, port: int) -> set[str]:
        """Returns the pods that may connect to a port of `target`."""
        return {name for name, pod in self.pods.items() if is_allowed(self.policies, pod, self.pods[target], port=port)}


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(Release())


def test_clients_of_the_namespace_reach_the_orchestrators_at_one_port(network: Network) -> None:
    assert {"client", "test", "other release"} <= network.sources("orchestrator", CLIENTS)
    assert "foreign client" not in network.sources("orchestrator", CLIENTS)


def test_the_ports_of_operators_and_of_metrics_are_closed_by_default(network: Network) -> None:
    assert network.sources("orchestrator", ADMIN) == network.sources("orchestrator", METRICS) == set()


def test_orchestrators_and_stages_alone_reach_the_ports_of_stages(network: Network) -> None:
    for target, port in (("thinker", 50051), ("voice", 50131), ("voice", 50150)):
        assert network.sources(target, port) == {"orchestrator", "thinker", "voice"}


def test_stages_have_no_other_port_open(network: Network) -> None:
    assert network.sources("thinker", 8000) == set()


def test_a_client_that_the_values_select_reaches_the_orchestrators() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}]
    network = Network(Release(at("networkPolicy.clients", peers)))
    assert network.sources("orchestrator", CLIENTS) == {"foreign client", "test"}


def test_operators_that_the_values_select_reach_the_admin_port() -> None:
    network = Network(Release(at("networkPolicy.operators", [{"podSelector": {"matchLabels": {"app": "client"}}}])))
    assert network.sources("orchestrator", ADMIN) == {"client"}


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_prometheus_reaches_the_metrics_if_a_monitor_exists(monitor: str) -> None:
    network = Network(Release(at(f"monitoring.{monitor}.enabled", True)))
    assert network.sources("orchestrator", METRICS) == {"prometheus"}


def test_edges_over_nixl_open_the_ports_of_ucx_between_stages_alone() -> None:
    network = Network(Release(at("pipeline.edges", NIXL_EDGE)))
    assert network.sources("voice", UCX) == {"thinker", "voice"}


def test_pods_of_the_former_release_reach_each_other_while_an_upgrade_changes_ports_and_connectors() -> None:
    upgrade = Release(
        at("pipeline.edges", [{**edge, "connector": "grpc"} for edge in NIXL_EDGE]),
        at("pipeline.stages.bell", {"engine": "fake", "group": "voice"}),
        at("stages.thinker.port", 50_100),
    )
    network = Network(upgrade)
    assert network.sources("voice", UCX) == {"thinker", "voice"}
    assert network.sources("thinker", 50_051) == {"orchestrator", "thinker", "voice"}


def test_the_ports_of_stages_can_be_in_another_range() -> None:
    network = Network(Release(at("networkPolicy.stagePortRange", "40000-40003"), *PORTS))
    assert network.sources("voice", 40_003) == {"orchestrator", "thinker", "voice"}
    assert network.sources("voice", 50_051) == set()


def test_pods_resolve_names(network: Network) -> None:
    for name in ("orchestrator", "thinker", "voice"):
        assert is_allowed(network.policies, network.pods[name], network.pods["dns"], port=53, protocol="UDP")


def test_pods_connect_to_nothing_else(network: Network) -> None:
    anywhere = Endpoint({}, "other")
    for name in ("orchestrator", "thinker", "voice"):
        assert not is_allowed(network.policies, network.pods[name], anywhere, port=443)


def test_an_external_stage_exchanges_data_with_stages_and_orchestrators() -> None:
    release = Release(
        EXTERNAL,
        at("stages.vocoder.external", {"service": "sampler", "port": 6000}),
        at("networkPolicy.externalStages", [{"podSelector": {"matchLabels": {"app": "client"}}}]),
    )
    network = Network(release)
    client = network.pods["client"]
    assert all(
        is_allowed(network.policies, network.pods[name], client, port=6000) for name in ("orchestrator", "voice")
    )
    assert is_allowed(network.policies, client, network.pods["voice"], port=50051)


@pytest.mark.parametrize("address", ["10.9.8.7", "2001:db8::7"])
def test_an_external_stage_at_an_address_of_the_pipeline_exchanges_data_with_stages(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    network = Network(Release(EXTERNAL, at("pipeline.stages.vocoder.addresses", [f"{host}:6000"])))
    outside = Endpoint({}, address=address)
    for name in ("orchestrator", "voice"):
        assert is_allowed(network.policies, network.pods[name], outside, port=6000)
        assert not is_allowed(network.policies, network.pods[name], outside, port=6001)
        assert not is_allowed(network.policies, network.pods[name], network.pods["client"], port=6000)
    assert is_allowed(network.policies, outside, network.pods["voice"], port=50_051)


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
        assert is_allowed(network.policies, network.pods[name], outside, port=6000)
    assert is_allowed(network.policies, outside, network.pods["voice"], port=50_051)


def test_an_empty_list_of_peers_permits_none() -> None:
    release = Release(
        EXTERNAL,
        at("stages.vocoder.external", {"service": "sampler", "port": 6000}),
        at("pipeline.media.store", "s3://bucket/media"),
        at("networkPolicy", {"clients": [], "dns": [], "externalStages": [], "operators": []}),
    )
    network = Network(release)
    assert network.sources("orchestrator", CLIENTS) == network.sources("media", 7790) == {"test"}
    assert network.sources("voice", 50_051) == {"orchestrator", "thinker", "voice"}
    for name in ("orchestrator", "voice", "media"):
        assert not is_allowed(network.policies, network.pods[name], network.pods["dns"], port=53, protocol="UDP")
        assert not is_allowed(network.policies, network.pods[name], network.pods["client"], port=6000)


def test_clients_reach_the_media_service_and_stages_do_not() -> None:
    release = Release(at("pipeline.media.store", "s3://bucket/media"))
    sources = Network(release).sources("media", 7790)
    assert {"client", "test"} <= sources
    assert not {"foreign client", "orchestrator", "thinker"} & sources


def test_policies_can_be_turned_off() -> None:
    assert not Release(at("networkPolicy.enabled", False)).of_kind("NetworkPolicy")


def test_no_role_is_created() -> None:
    release = Release()
    assert not release.of_kind("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret")


def test_every_pod_runs_as_the_same_user_who_is_not_root() -> None:
    for pod in all_pods(Release(at("pipeline.media.store", "s3://bucket/media")).objects):
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
        "thinker": ["stagemesh://stage/release-thinker-*"],
        "voice": ["stagemesh://stage/release-voice-*"],
    }


def test_probes_have_a_port_without_tls() -> None:
    release = Release(at("tls", {"enabled": True, "issuer": {"name": "ca"}}))
    config = release.config()
    assert (config["tls"], config["health_listen"]) == ("/etc/stagemesh/tls", "0.0.0.0:7782")
    for name in ("thinker", "acoustic", "vocoder"):
        container = release.container(name)
        ports = {
            probe: container[probe]["grpc"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        (port,) = set(ports.values())
        assert f"--health-listen=0.0.0.0:{port}" in container["args"]
        assert "--tls=/etc/stagemesh/tls" in container["args"]
        assert f"--listen=0.0.0.0:{port}" not in container["args"]


def test_a_release_with_tls_has_another_topology() -> None:
    with_tls = Release(at("tls", {"enabled": True, "issuer": {"name": "ca"}}))
    topologies = {release.generation().partition("-")[0] for release in (Release(), with_tls)}
    assert len(topologies) == 2


def test_given_certificates_are_mounted_by_reference() -> None:
    release = Release(at("tls", {"enabled": True, "secrets": TLS_SECRETS}))
    assert set(release.secrets("orchestrator").values()) == {"tls-o"}
    assert set(release.secrets("voice").values()) == {"tls-s"}
    assert not release.of_kind("Certificate")


def test_without_tls_no_certificate_is_mounted() -> None:
    assert "secret" not in str(Release().volume("voice", "config"))
