"""The gateways of a release: how clients reach them, and how they reach the orchestrators."""

import pytest

from tests.k8s.manifests import field
from tests.k8s.release import GATEWAY, ISSUER, TOKENS, Release, at, settings
from tests.k8s.test_security import Network

HTTP = 8000
FORWARDING = at("gateway.forwardTokens", True)


def test_a_release_has_no_gateway_by_default() -> None:
    assert [item for item in Release().objects if item["metadata"]["name"].endswith("-gateway")] == []


def test_a_gateway_calls_the_address_that_clients_use() -> None:
    release = Release(GATEWAY)
    arguments = field(release["Pod/release-test"], "spec.containers.0.args")
    ((server,),) = release.config("gateway")["servers"]
    assert f"--server={server}" in arguments
    assert server == "release-orchestrator.models.svc.cluster.local:7780"


@pytest.mark.parametrize(("secret", "scheme"), [("", "HTTP"), ("https", "HTTPS")])
def test_probes_ask_for_the_health_of_the_gateway(secret: str, scheme: str) -> None:
    container = Release(GATEWAY, at("gateway.httpsSecret", secret)).container("gateway")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"port": "http", "path": "/health", "scheme": scheme}
    assert {"name": "http", "containerPort": HTTP, "protocol": "TCP"} in container["ports"]


def test_gateways_know_the_names_at_which_clients_call_them() -> None:
    ingress = at("gateway.ingress", {"enabled": True, "host": "ai.example.com"})
    hosts = Release(GATEWAY, ingress, at("gateway.hosts", ["ai.example.net"])).config("gateway")["hosts"]
    inside = ["release-gateway", "release-gateway.models", "release-gateway.models.svc"]
    assert hosts == [*inside, "release-gateway.models.svc.cluster.local", "ai.example.com", "ai.example.net"]


def test_a_gateway_stores_voices_in_the_given_claim() -> None:
    release = Release(GATEWAY, at("gateway.voicesClaim", "voices"))
    claims = [each for each in release.pod("gateway").spec["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [{"name": "voices", "persistentVolumeClaim": {"claimName": "voices"}}]
    folder = release.config("gateway")["voices"]
    assert {"name": "voices", "mountPath": folder} in release.container("gateway")["volumeMounts"]


def test_a_gateway_has_the_certificate_of_a_client() -> None:
    release = Release(GATEWAY, ISSUER)
    spec = release["Certificate/release-gateway"]["spec"]
    assert spec["uris"] == ["stagemesh://client/release-gateway"]
    assert release.secrets("gateway") == {f"tls/{key}": spec["secretName"] for key in ("ca.crt", "tls.crt", "tls.key")}
    assert release.config("gateway")["tls"] == "/etc/stagemesh/tls"


def test_a_gateway_that_forwards_tokens_has_no_rights_of_its_own() -> None:
    release = Release(GATEWAY, ISSUER, TOKENS, FORWARDING)
    spec = release["Certificate/release-gateway"]["spec"]
    assert "uris" not in spec
    assert "release-gateway.models.svc" in spec["dnsNames"]
    assert release.secrets("gateway") == {"tls/ca.crt": spec["secretName"]}


def test_orchestrators_accept_the_tokens_that_gateways_forward() -> None:
    release = Release(ISSUER, TOKENS)
    assert release.config()["tokens"]["file"] == "/etc/stagemesh/tokens/tokens.json"
    assert release.secrets("orchestrator")["tokens/tokens.json"] == "callers"
    assert "tokens" not in Release(ISSUER).config()


def test_gateways_reach_the_orchestrators_alone_even_if_clients_do_not() -> None:
    network = Network(Release(GATEWAY, at("networkPolicy.clients", [])))
    gateway = network.pods["gateway"]
    assert network.sources("orchestrator 7780") == {"gateway", "test"}
    assert not network.allows(gateway, "thinker", port=50051)
    assert network.allows(gateway, "dns", port=53, protocol="UDP")


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_prometheus_scrapes_the_gateways(monitor: str) -> None:
    release = Release(
        GATEWAY,
        at("gateway.httpsSecret", "public"),
        at("networkPolicy.gatewayClients", []),
        at(f"monitoring.{monitor}.enabled", True),
    )
    kind = monitor[0].upper() + monitor[1:]
    endpoints = "endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"
    (endpoint,) = release[f"{kind}/release-gateway"]["spec"][endpoints]
    assert settings(endpoint, "port", "path", "scheme") == ["metrics", "/metrics", None]
    assert release.config("gateway")["metrics_listen"] == "0.0.0.0:9464"
    assert {"name": "metrics", "containerPort": 9464, "protocol": "TCP"} in release.container("gateway")["ports"]
    assert field(release["Service/release-gateway-metrics"], "spec.ports.0.port") == 9464
    assert Network(release).sources("gateway 8000") == set()
    assert Network(release).sources("gateway 9464") == {"prometheus"}
