"""The job servers of a release: their database, how clients reach them, and how they reach the orchestrators."""

import json

from tests.k8s.network import Endpoint
from tests.k8s.release import Release, at
from tests.k8s.test_security import Network

GRPC, MEDIA = 7795, 7790
ON = {**at("pipeline.media.store", "s3://bucket/media"), **at("jobs.enabled", True)}
POSTGRESQL = at("jobs.databaseSecret", "jobs-database")
ISSUER = at("tls", {"enabled": True, "issuer": {"name": "ca"}})
TOKENS = at("tls.tokens.secret", "callers")
GATEWAY = at("gateway.enabled", True)
HOST = "release-jobs.models.svc.cluster.local"


def test_a_release_has_no_job_server_by_default() -> None:
    release = Release(at("pipeline.media.store", "s3://bucket/media"))
    assert [item for item in release.objects if item["metadata"]["name"].endswith("-jobs")] == []
    assert "jobs_endpoint" not in release.config()


def test_a_new_model_does_not_restart_job_servers() -> None:
    before, after = (Release(ON, at("pipeline.stages.thinker.model", model)) for model in ("smollm2", "qwen3"))
    assert before.generation() != after.generation()
    assert before["Deployment/release-jobs"] == after["Deployment/release-jobs"]


def test_with_tls_a_job_server_has_the_certificate_of_a_client_and_a_port_for_probes() -> None:
    release = Release(ON, ISSUER)
    spec = release["Certificate/release-jobs"]["spec"]
    assert spec["uris"] == ["stagemesh://client/release-jobs"]
    assert {HOST, "localhost"} <= set(spec["dnsNames"])
    assert release.secrets("jobs") == {f"tls/{key}": spec["secretName"] for key in ("ca.crt", "tls.crt", "tls.key")}
    config, container = release.config("jobs"), release.container("jobs")
    assert (config["tls"], config["health_listen"]) == ("/etc/stagemesh/tls", "0.0.0.0:7796")
    assert {container[f"{name}Probe"]["grpc"]["port"] for name in ("startup", "liveness", "readiness")} == {7796}
    assert release.config()["jobs_server_name"] == HOST


def test_job_servers_accept_the_tokens_that_orchestrators_accept() -> None:
    release = Release(ON, ISSUER, TOKENS)
    assert release.config("jobs")["tokens"] == release.config()["tokens"]
    assert release.secrets("jobs")["tokens/tokens.json"] == "callers"
    assert "tokens" not in Release(ON, ISSUER).config("jobs")


def test_job_servers_reach_the_orchestrators_and_what_the_values_permit() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.9.8.7/32"}}], "ports": [{"protocol": "TCP", "port": 5432}]}
    network = Network(Release(ON, at("networkPolicy", {"clients": [], "jobsEgress": [rule]})))
    jobs, database = network.pods["jobs"], Endpoint({}, address="10.9.8.7")
    assert network.sources("orchestrator 7780") == {"jobs", "test"}
    assert network.allows(jobs, database, port=5432)
    assert network.allows(jobs, "dns", port=53, protocol="UDP")
    assert not network.allows(jobs, database, port=443)
    assert not network.allows(jobs, "thinker", port=50_051)


def test_no_value_of_a_secret_is_in_an_object() -> None:
    release = Release(ON, POSTGRESQL, ISSUER, TOKENS)
    assert not release.of_kind("Secret", "ConfigMap")
    assert "postgresql://" not in json.dumps(release.objects)
