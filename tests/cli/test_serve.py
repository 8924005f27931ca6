"""Runs `stagemesh serve` as a process, with its configuration from a file and from standard input."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from stagemesh.common.exit_codes import ExitCode
from stagemesh.common.process_config import dump_config
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.launcher.ports import PortPicker
from tests.children import commands_of_children
from tests.cli.commands import COMMAND
from tests.stage.replicas import stage_config

LIMIT_S = 40
IN_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""The command that runs another command as the first process of a namespace, like the process of a container."""


def _stage(endpoint: str) -> bytes:
    return dump_config(replace(stage_config(), listen=endpoint))


def _await_health(endpoint: str, name: str) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        call = watch(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True, timeout=LIMIT_S)
        assert any(each.status == health_pb2.HealthCheckResponse.SERVING for each in call)
        call.cancel()


@contextmanager
def _serving(role: str, config: str, *, stdin: bytes = b"") -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a process, and sends SIGTERM to it at the end. Asserts that it then exits with code 0."""
    with subprocess.Popen([*COMMAND, "serve", role, config], stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{PortPicker().pick()}"


def test_a_stage_is_served_with_the_configuration_of_a_file(tmp_path: Path, endpoint: str) -> None:
    path = tmp_path / "stage.json"
    path.write_bytes(_stage(endpoint))
    with _serving("stage", str(path)):
        _await_health(endpoint, "stagemesh.v1.StageService")


def test_a_stage_is_served_with_the_configuration_of_standard_input(endpoint: str) -> None:
    with _serving("stage", "-", stdin=_stage(endpoint)):
        _await_health(endpoint, "liveness")


def test_an_orchestrator_is_served_with_the_configuration_of_standard_input(tiny: Path, endpoint: str) -> None:
    replicas = {stage: (ReplicaAddress(f"{stage}-0", "127.0.0.1:1"),) for stage in ("first", "second")}
    config = dump_config(OrchestratorConfig(str(tiny), replicas, endpoint))
    with _serving("orchestrator", "-", stdin=config):
        _await_health(endpoint, "liveness")


@pytest.mark.parametrize("role", ["stage", "orchestrator"])
def test_an_invalid_configuration_is_a_usage_error_that_names_its_origin(role: str, tmp_path: Path) -> None:
    path = tmp_path / "-config.json"
    for config, name in ((str(path), f"{path} cannot be read"), ("-", "standard input: ")):
        command = [*COMMAND, "serve", role, config]
        ran = subprocess.run(command, input="{", capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert (ran.returncode, ran.stderr.startswith(name)) == (ExitCode.USAGE, True), ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a namespace of process ids")
def test_a_sigterm_before_the_first_process_of_a_container_is_ready_is_not_lost(endpoint: str) -> None:
    program = "from stagemesh.orchestrator.cli import main; main()"
    command = [*IN_CONTAINER, sys.executable, "-c", program, "serve", "stage", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as container:
        try:
            first = _replaced_by(container, "stagemesh.services.stage")
            # The process still waits for its configuration, and has no handler for signals.
            first.send_signal(signal.SIGTERM)
            container.communicate(_stage(endpoint), timeout=LIMIT_S)
            assert container.returncode == 0
        finally:
            container.kill()


def _replaced_by(container: "subprocess.Popen[bytes]", module: str) -> psutil.Process:
    """Waits until the only child of `container` runs `module`, and returns the child."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        for child, command in commands_of_children(psutil.Process(container.pid)).items():
            if module in command:
                return child
        time.sleep(0.02)
    raise AssertionError(f"the process was not replaced by {module}")
