"""The processes accept the arguments, configs, pipeline files and triggers that the chart renders for them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from stagemesh.cli.app import app
from stagemesh.common.process.config import ConfigT, TokenConfig, load_config
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.gateway.config import GatewayConfig
from stagemesh.jobs.config import JobServerConfig
from stagemesh.orchestrator.config import OrchestratorConfig
from stagemesh.pipeline import load_pipeline
from tests.k8s.helm import FILES, read_values, render
from tests.k8s.manifests import all_pods
from tests.k8s.release import Release, at

JOB_SETTINGS = {
    "max_running": "maxRunning",
    "max_queued": "maxQueued",
    "max_queued_per_caller": "maxQueuedPerCaller",
    "max_jobs_per_caller": "maxJobsPerCaller",
    "max_request_bytes": "maxRequestBytes",
    "max_failures": "maxFailures",
    "lease_s": "leaseSeconds",
    "max_wait_s": "maxWaitSeconds",
    "keep_s": "keepSeconds",
}


def parse(arguments: list[str]) -> dict[str, Any]:
    """Returns the options of a `stagemesh` command. Raises UsageError if it does not have them."""
    command = typer.main.get_command(app)
    rest = list(arguments)
    while isinstance(command, TyperGroup):
        command = command.commands[rest.pop(0)]
    return command.make_context(arguments[0], rest).params


def read_config(kind: type[ConfigT], text: str, folder: Path) -> ConfigT:
    """Returns the config that a process reads from a file with this text."""
    file = folder / "config.json"
    file.write_text(text)
    return load_config(kind, file)


@pytest.mark.parametrize("name", FILES)
def test_orchestrators_accept_their_config(name: str) -> None:
    for pod in all_pods(render(read_values(FILES[name]))):
        if text := pod.annotations.get("stagemesh.dev/config"):
            assert OrchestratorConfig(**json.loads(text)).metrics_listen == "0.0.0.0:9464"


def test_orchestrators_accept_their_tokens(tmp_path: Path) -> None:
    provider = {"keys": "https://id.example/keys", "issuer": "https://id.example", "audience": "mesh"}
    release = Release(at("tls", {"enabled": True, "issuer": {"name": "ca"}, "tokens": {"secret": "s", **provider}}))
    config = read_config(OrchestratorConfig, release.pod("orchestrator").annotations["stagemesh.dev/config"], tmp_path)
    assert config.tokens == TokenConfig(file="/etc/stagemesh/tokens/tokens.json", **provider)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "corsOrigins": ["https://a.example"],
            "keepAliveSeconds": 9,
            "httpsSecret": "https",
            "maxBodyBytes": 2**33,
            "maxWebsockets": 7,
            "maxResponsesBytes": 2**33,
            "responseTtlSeconds": 0.5,
            "page": False,
            "voicesClaim": "voices",
        },
        {"strict": True, "unknownParameters": "warn", "aliases": {"models": {"gpt": "p"}, "voices": {"ash": "bass"}}},
    ],
    ids=["http", "https", "parameters"],
)
def test_gateways_accept_their_config(settings: dict[str, Any], tmp_path: Path) -> None:
    release = Release(at("gateway", {"enabled": True, **settings}))
    config = read_config(GatewayConfig, release.pod("gateway").annotations["stagemesh.dev/gateway"], tmp_path)
    assert config.max_body_bytes == settings.get("maxBodyBytes", 16 << 20)
    assert config.max_websockets == settings.get("maxWebsockets", 256)
    assert config.max_responses_bytes == settings.get("maxResponsesBytes", 64 << 20)
    assert config.response_ttl_s == settings.get("responseTtlSeconds", 3600)
    assert config.keep_alive_s == settings.get("keepAliveSeconds", 120)
    assert list(config.cors_origins) == settings.get("corsOrigins", [])
    assert config.page == settings.get("page", True)
    assert (config.strict, config.unknown_parameters) == (
        settings.get("strict", False),
        settings.get("unknownParameters", "reject"),
    )
    assert asdict(config.aliases) == {"models": {}, "voices": {}} | settings.get("aliases", {})
    assert (config.voices is not None) == ("voicesClaim" in settings)
    assert (config.https is not None) == ("httpsSecret" in settings)


@pytest.mark.parametrize(
    ("settings", "tls"),
    [
        ({}, {}),
        (
            {
                "databaseSecret": "database",
                "replicas": 2,
                "maxQueued": 2**33,
                "leaseSeconds": 2.5,
                "maxWaitSeconds": 9,
                "keepSeconds": 1e7,
            },
            {"enabled": True, "issuer": {"name": "ca"}, "tokens": {"secret": "callers"}},
        ),
    ],
    ids=["sqlite", "postgresql"],
)
def test_job_servers_accept_their_config(settings: dict[str, Any], tls: dict[str, Any], tmp_path: Path) -> None:
    options = {
        "storage_options": {"s3": {"anon": False}},
        "max_file_bytes": 2**33,
        "max_uploads": 7,
        "keep_uploads_s": 9.5,
    }
    media: dict[str, Any] = {"store": "s3://bucket/media", **options}
    release = Release(at("pipeline.media", media), at("jobs", {"enabled": True, **settings}), at("tls", tls))
    config = read_config(JobServerConfig, release.pod("jobs").annotations["stagemesh.dev/jobs"], tmp_path)
    defaults = JobServerConfig("speech", config.listen, config.servers, MediaConfig("s3://bucket/media"))
    assert config.media == MediaConfig(**media)
    assert config.database_file == ("/etc/stagemesh/database/url" if settings else "")
    for field, name in JOB_SETTINGS.items():
        assert getattr(config, field) == settings.get(name, getattr(defaults, field)), name
    assert config.tokens == (TokenConfig(file="/etc/stagemesh/tokens/tokens.json") if tls else None)


@pytest.mark.parametrize("name", FILES)
def test_commands_have_the_arguments_of_the_containers(name: str) -> None:
    parsed = [
        parse(container["args"])
        for pod in all_pods(render(read_values(FILES[name])))
        for container in pod.containers
        if "command" not in container
    ]
    assert parsed


@pytest.mark.parametrize("name", ["speech-cpu", "digits-cpu"])
def test_pods_accept_their_pipeline_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    for pod in all_pods(render(read_values(FILES[name]))):
        if text := pod.annotations.get("stagemesh.dev/pipeline"):
            file.write_text(text)
            assert load_pipeline(str(file), check_models=False).name == name.removesuffix("-cpu")
