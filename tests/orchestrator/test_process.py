"""Runs `python -m stagemesh.orchestrator` as a process."""

import asyncio
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode, InvalidRequestError
from stagemesh.common.process.config import dump_config, load_config
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.service import serve
from stagemesh.rpc.channels import open_channel
from tests.orchestrator.mesh import CHAIN
from tests.rpc.health_calls import Request, Response, watch


def _config(folder: Path, *, port: int, stages: str = "abc") -> Path:
    pipeline, config = folder / "chain.yaml", folder / "orchestrator.json"
    pipeline.write_text(CHAIN)
    replicas = {stage: (ReplicaAddress(f"{stage}-0", "127.0.0.1:1"),) for stage in stages}
    config.write_bytes(dump_config(OrchestratorConfig(str(pipeline), replicas, f"127.0.0.1:{port}")))
    return config


async def _start(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stagemesh.orchestrator", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )


async def _output(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(20):
        _, said = await process.communicate()
    return said.decode()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_the_process_is_alive_without_stages_and_ends_at_sigterm(tmp_path: Path, port: int) -> None:
    process = await _start(_config(tmp_path, port=port))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        async for answer in watch(channel)(Request(service="liveness"), wait_for_ready=True, timeout=20):
            if answer.status == Response.SERVING:
                break
    process.send_signal(signal.SIGTERM)
    await _output(process)
    assert process.returncode == 0


async def test_a_port_in_use_is_a_refusal(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = await _start(_config(tmp_path, port=port))
        said = await _output(process)
    assert process.returncode == ExitCode.REFUSED
    assert f"port {port} of 127.0.0.1" in said


async def test_a_config_without_all_stages_ends_the_process_with_the_cause(tmp_path: Path, port: int) -> None:
    process = await _start(_config(tmp_path, port=port, stages="az"))
    said = await _output(process)
    assert process.returncode == ExitCode.USAGE
    assert "stages without a replica: b, c; unknown stages: z" in said


async def test_a_warm_stage_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = replace(load_config(OrchestratorConfig, _config(tmp_path, port=7)), warm={"z": 1.0})
    with pytest.raises(InvalidRequestError, match="unknown stages: z"):
        await serve(config, asyncio.Event())


@pytest.mark.parametrize("above_s", [-1.0, float("nan"), float("inf")])
def test_a_warm_tier_needs_a_number_of_seconds(tmp_path: Path, above_s: float) -> None:
    config = load_config(OrchestratorConfig, _config(tmp_path, port=7))
    with pytest.raises(ValueError, match=r"warm\.a"):
        replace(config, warm={"a": above_s})


def test_a_config_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    config = load_config(OrchestratorConfig, _config(tmp_path, port=7))
    assert config.replicas["b"] == (ReplicaAddress("b-0", "127.0.0.1:1"),)


def test_an_unknown_key_in_a_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"pipeline": "x", "replicas": {}, "listen": "h:1", "lisen": "h:2"}')
    with pytest.raises(InvalidRequestError, match="lisen"):
        load_config(OrchestratorConfig, path)


@pytest.mark.parametrize(
    ("part", "unknown"),
    [
        ('"registration": {"lease": 30}', "lease"),
        ('"dns": {"a": {"host": "h", "port": 1, "poll": 5}}', "poll"),
        ('"replicas": {"a": [{"name": "a-0", "endpoint": "h:2", "zome": "z"}]}', "zome"),
    ],
)
def test_an_unknown_key_inside_a_part_of_a_config_is_named(part: str, unknown: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"pipeline": "x", "listen": "h:1", "replicas": {}, ' + part + "}")
    with pytest.raises(InvalidRequestError, match=rf"\b{unknown}\b"):
        load_config(OrchestratorConfig, path)


def test_the_admin_port_must_differ_from_the_port_for_clients() -> None:
    with pytest.raises(ValueError, match="admin_listen is h:3"):
        OrchestratorConfig("x", {}, "h:3", admin_listen="h:3")


def test_replica_names_are_unique() -> None:
    twice = (ReplicaAddress("a-0", "h:1"), ReplicaAddress("a-0", "h:2"))
    with pytest.raises(ValueError, match="a-0 more than once"):
        OrchestratorConfig("x", {"a": twice}, "h:3")
