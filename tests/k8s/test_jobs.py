"""The job servers of a release: their database, how clients reach them, and how they reach the orchestrators."""

import json
from typing import Any

import pytest

from tests.k8s.manifests import field
from tests.k8s.network import Endpoint, is_allowed
from tests.k8s.release import Release, at, settings
from tests.k8s.test_security import CLIENTS, TLS_SECRETS, Network

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


def test_clients_learn_the_address_of_the_job_servers_from_the_orchestrators() -> None:
    assert Release(ON).config()["jobs_endpoint"] == f"{HOST}:{GRPC}"
    assert "jobs_server_name" not in Release(ON).config()
    outside = Release(ON, ISSUER, at("jobs.endpoint", "jobs.example.com:443")).config()
    assert (outside["jobs_endpoint"], outside["jobs_server_name"]) == ("jobs.example.com:443", HOST)


def test_a_job_server_calls_the_address_that_clients_use_and_has_the_store_of_the_pipeline() -> None:
    media = {"store": "s3://bucket/media", "storage_options": {"s3": {"endpoint_url": "https://s3.example"}}}
    config = Release(ON, at("pipeline.media", media)).config("jobs")
    assert config["servers"] == ["release-orchestrator.models.svc.cluster.local:7780"]
    assert (config["pipeline"], config["media"]) == ("speech", media)


def test_each_pod_names_its_process_after_itself() -> None:
    container = Release(ON).container("jobs")
    assert container["args"] == ["serve", "jobs", "/etc/stagemesh/jobs.json", "--name=$(POD_NAME)"]
    assert field(container["env"][0], "valueFrom.fieldRef.fieldPath") == "metadata.name"


def test_a_new_model_does_not_restart_job_servers() -> None:
    before, after = (Release(ON, at("pipeline.stages.thinker.model", model)) for model in ("smollm2", "qwen3"))
    assert before.generation() != after.generation()
    assert before["Deployment/release-jobs"] == after["Deployment/release-jobs"]


def test_a_sqlite_file_is_in_a_claim_that_one_pod_uses_at_a_time() -> None:
    release = Release(ON, at("jobs.sqlite", {"size": "5Gi", "storageClass": "fast"}))
    claim = release["PersistentVolumeClaim/release-jobs"]
    deployment = release["Deployment/release-jobs"]["spec"]
    assert settings(claim, "spec.accessModes", "spec.storageClassName", "spec.resources.requests.storage") == [
        ["ReadWriteOnce"],
        "fast",
        "5Gi",
    ]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert release.volume("jobs", "database") == {"persistentVolumeClaim": {"claimName": "release-jobs"}}
    # The folder of the default database is below STAGEMESH_HOME.
    assert {"name": "database", "mountPath": "/var/lib/stagemesh/jobs"} in release.container("jobs")["volumeMounts"]
    assert not {"database", "database_file"} & release.config("jobs").keys()


def test_a_sqlite_file_can_be_in_a_given_claim() -> None:
    release = Release(ON, at("jobs.sqlite.claim", "kept"))
    assert release.volume("jobs", "database") == {"persistentVolumeClaim": {"claimName": "kept"}}
    assert not release.of_kind("PersistentVolumeClaim")


def test_several_pods_share_the_database_whose_url_is_in_a_secret() -> None:
    release = Release(ON, POSTGRESQL, at("jobs", {"replicas": 3, "surge": 2}))
    deployment = release["Deployment/release-jobs"]["spec"]
    assert settings(deployment, "replicas", "strategy.rollingUpdate.maxSurge") == [3, 2]
    assert release.secrets("jobs") == {"database/url": "jobs-database"}
    assert release.config("jobs")["database_file"] == "/etc/stagemesh/database/url"
    assert release.volume("jobs", "database") is None
    assert not release.of_kind("PersistentVolumeClaim")


def test_a_job_server_is_ready_when_it_has_its_database_and_alive_without_it() -> None:
    container = Release(ON).container("jobs")
    probes = {name: container[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")}
    assert probes == {
        "startup": {"port": GRPC, "service": "liveness"},
        "liveness": {"port": GRPC, "service": "liveness"},
        "readiness": {"port": GRPC, "service": ""},
    }


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


def test_a_job_server_has_the_secret_that_the_values_name() -> None:
    secrets = {**TLS_SECRETS, "jobs": "tls-j"}
    release = Release(ON, at("tls", {"enabled": True, "secrets": secrets}))
    assert set(release.secrets("jobs").values()) == {"tls-j"}
    assert not release.of_kind("Certificate")


def test_job_servers_accept_the_tokens_that_orchestrators_accept() -> None:
    release = Release(ON, ISSUER, TOKENS)
    assert release.config("jobs")["tokens"] == release.config()["tokens"]
    assert release.secrets("jobs")["tokens/tokens.json"] == "callers"
    assert "tokens" not in Release(ON, ISSUER).config("jobs")


def test_clients_and_gateways_reach_the_job_servers() -> None:
    sources = Network(Release(ON, GATEWAY)).sources("jobs", GRPC)
    assert {"client", "gateway"} <= sources
    assert not {"foreign client", "orchestrator", "thinker"} & sources


@pytest.mark.parametrize(("change", "sources"), [({}, set()), (GATEWAY, {"gateway"})], ids=["no gateway", "gateway"])
def test_gateways_alone_reach_the_job_servers_and_their_files_if_clients_do_not(
    change: dict[str, Any], sources: set[str]
) -> None:
    network = Network(Release(ON, change, at("networkPolicy.clients", [])))
    assert network.sources("jobs", GRPC) == sources
    assert network.sources("media", MEDIA) == {"test"} | sources


def test_job_servers_reach_the_orchestrators_and_what_the_values_permit() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.9.8.7/32"}}], "ports": [{"protocol": "TCP", "port": 5432}]}
    network = Network(Release(ON, at("networkPolicy", {"clients": [], "jobsEgress": [rule]})))
    jobs, database = network.pods["jobs"], Endpoint({}, address="10.9.8.7")
    assert network.sources("orchestrator", CLIENTS) == {"jobs", "test"}
    assert is_allowed(network.policies, jobs, database, port=5432)
    assert is_allowed(network.policies, jobs, network.pods["dns"], port=53, protocol="UDP")
    assert not is_allowed(network.policies, jobs, database, port=443)
    assert not is_allowed(network.policies, jobs, network.pods["thinker"], port=50_051)


def test_a_folder_of_media_is_mounted_in_the_job_servers() -> None:
    given: dict[str, Any] = {
        "volumes": [{"name": "media", "persistentVolumeClaim": {"claimName": "media"}}],
        "volumeMounts": [{"name": "media", "mountPath": "/media"}],
    }
    folders = dict.fromkeys(("media", "stageDefaults", "jobs"), given)
    release = Release(at("pipeline.media.store", "/media"), folders, at("jobs.enabled", True))
    assert given["volumeMounts"][0] in release.container("jobs")["volumeMounts"]


def test_no_value_of_a_secret_is_in_an_object() -> None:
    release = Release(ON, POSTGRESQL, ISSUER, TOKENS)
    assert not release.of_kind("Secret", "ConfigMap")
    assert "postgresql://" not in json.dumps(release.objects)
