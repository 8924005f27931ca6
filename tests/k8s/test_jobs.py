"""The job servers of a release: their database, how clients reach them, and how they reach the orchestrators."""

import json

from tests.k8s.network import Endpoint
from tests.k8s.release import ISSUER, JOBS, MEDIA, TOKENS, Release, at
from tests.k8s.test_security import Network

POSTGRESQL = at("jobs.databaseSecret", "jobs-database")
HOST = "release-jobs.models.svc.cluster.local"


def test_a_release_has_no_job_server_by_default() -> None:
    release = Release(MEDIA)
    assert [item for item in release.objects if item["metadata"]["name"].endswith("-jobs")] == []
    assert "jobs_endpoint" not in release.config()


def test_with_tls_a_job_server_has_the_certificate_of_a_client_and_a_port_for_probes() -> None:
    release = Release(JOBS, ISSUER)
    spec = release["Certificate/release-jobs"]["spec"]
    assert spec["uris"] == ["stagemesh://client/release-jobs"]
    assert {HOST, "localhost"} <= set(spec["dnsNames"])
    assert release.secrets("jobs") == {f"tls/{key}": spec["secretName"] for key in ("ca.crt", "tls.crt", "tls.key")}
    config = release.config("jobs")
    assert (config["tls"], config["health_listen"]) == ("/etc/stagemesh/tls", "0.0.0.0:7796")
    assert release.probe_ports("jobs") == {7796}
    assert release.config()["jobs_server_name"] == HOST


def test_job_servers_accept_the_tokens_that_orchestrators_accept() -> None:
    release = Release(JOBS, ISSUER, TOKENS)
    assert release.config("jobs")["tokens"] == release.config()["tokens"]
    assert release.secrets("jobs")["tokens/tokens.json"] == "callers"
    assert "tokens" not in Release(JOBS, ISSUER).config("jobs")


def test_job_servers_reach_the_orchestrators_and_what_the_values_permit() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.9.8.7/32"}}], "ports": [{"protocol": "TCP", "port": 5432}]}
    network = Network(Release(JOBS, at("networkPolicy", {"clients": [], "jobsEgress": [rule]})))
    jobs, database = network.pods["jobs"], Endpoint({}, address="10.9.8.7")
    assert network.sources("orchestrator 7780") == {"jobs", "test"}
    assert network.allows(jobs, database, port=5432)
    assert network.allows(jobs, "dns", port=53, protocol="UDP")
    assert not network.allows(jobs, database, port=443)
    assert not network.allows(jobs, "thinker", port=50_051)


def test_no_value_of_a_secret_is_in_an_object() -> None:
    release = Release(JOBS, POSTGRESQL, ISSUER, TOKENS)
    assert not release.of_kind("Secret", "ConfigMap")
    assert "postgresql://" not in json.dumps(release.objects)
