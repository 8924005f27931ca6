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

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import ExitCode
from stagemesh.common.process.config import dump_config
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.rpc.channels import CHANNEL_OPTIONS, open_sync
from stagemesh.rpc.credentials import Credentials
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.children import commands_of_children, killed_at_end
from tests.cli.commands import COMMAND
from tests.credentials import issue
from tests.rpc.health_calls import wait_status
from tests.stage.replicas import stage_config
from tests.system.pipelines import pipeline_file

LIMIT_S = 40
IN_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""The command that runs another command as the first process of a namespace, like the process of a container."""


def _stage(endpoint: str) -> bytes:
    return dump_config(replace(stage_config(), listen=endpoint))


def _await_health(endpoint: str, name: str) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        wait_status(channel, name, timeout_s=LIMIT_S)


@contextmanager
def _serving(
    role: str, *arguments: str, stdin: bytes = b"", environment: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a process, and sends SIGTERM to it at the end. Asserts that it then exits with code 0."""
    command = [*COMMAND, "serve", role, *arguments]
    with killed_at_end(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)) as process:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{PortPicker().pick()}"


@pytest.fixture
def health_endpoint(endpoint: str) -> str:
    return f"127.0.0.1:{PortPicker().pick_after(int(endpoint.rpartition(':')[2]))}"


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
    with _serving("orchestrator", "-", stdin=dump_config(OrchestratorConfig(str(tiny), replicas, endpoint))):
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
    program = "from stagemesh.cli.__main__ import main; main()"
    command = [*IN_CONTAINER, sys.executable, "-c", program, "serve", "stage", "-"]
    with killed_at_end(subprocess.Popen(command, stdin=subprocess.PIPE)) as container:
        # The process still waits for its configuration, and has no handler for signals.
        _replaced_by(container, "stagemesh.services.stage").send_signal(signal.SIGTERM)
        container.communicate(_stage(endpoint), timeout=LIMIT_S)
        assert container.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a namespace of process ids")
def test_a_command_that_is_the_first_process_of_a_container_ends_on_sigterm(endpoint: str) -> None:
    program = "from stagemesh.cli.__main__ import main; main()"
    command = [*IN_CONTAINER, sys.executable, "-c", program, "probe-transport", "--serve", endpoint, "--json"]
    with killed_at_end(subprocess.Popen(command, stdout=subprocess.PIPE)) as container:
        assert container.stdout is not None
        assert b"ready" in container.stdout.readline()
        (first,) = psutil.Process(container.pid).children()
        first.send_signal(signal.SIGTERM)
        assert container.wait(timeout=LIMIT_S) == 0


def _replaced_by(container: "subprocess.Popen[bytes]", module: str) -> psutil.Process:
    """Waits until the only child of `container` runs `module`, and returns the child."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        for child, command in commands_of_children(psutil.Process(container.pid)).items():
            if module in command:
                return child
        time.sleep(0.02)
    raise AssertionError(f"the process was not replaced by {module}")


def _options(pipeline: Path, endpoint: str, *, stage: str = "second") -> list[str]:
    """Returns the options for a stage of a pipeline file."""
    return ["--pipeline", str(pipeline), "--stage", stage, "--replica", "pod-7", "--listen", endpoint]


def _described(endpoint: str) -> stage_pb2.DescribeResponse:
    with grpc.insecure_channel(endpoint) as channel:
        return stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=LIMIT_S)


def test_a_stage_is_served_as_the_pipeline_file_describes_it(tiny: Path, endpoint: str) -> None:
    with _serving("stage", *_options(tiny, endpoint), "--generation", "3fa19c-b70e11"):
        _await_health(endpoint, "stagemesh.v1.StageService")
        found = _described(endpoint)
    assert (found.pipeline, found.stage, found.replica) == ("tiny", "second", "pod-7")
    assert (found.generation, found.engine) == ("3fa19c-b70e11", "fake")


def test_health_checks_need_no_certificate(tiny: Path, tmp_path: Path, endpoint: str, health_endpoint: str) -> None:
    stage, orchestrator = issue(tmp_path, "stage/second/pod-7"), issue(tmp_path, "orchestrator/main")
    tls = ("--tls", str(stage), "--health-listen", health_endpoint)
    with _serving("stage", *_options(tiny, endpoint), *tls):
        _await_health(health_endpoint, "stagemesh.v1.StageService")
        with open_sync(endpoint, Credentials(orchestrator), CHANNEL_OPTIONS) as channel:
            found = stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=LIMIT_S)
    assert found.replica == "pod-7"


def test_a_stage_that_sleeps_when_it_is_idle_begins_asleep(tiny: Path, endpoint: str) -> None:
    with _serving("stage", *_options(tiny, endpoint), "--sleep-when-idle-s", "5"):
        _await_health(endpoint, "stagemesh.v1.StageControlService")
        found = _described(endpoint)
    assert (found.state, found.detail) == (stage_pb2.REPLICA_STATE_ASLEEP, "standing by")


def test_only_the_model_of_the_served_stage_must_exist(tmp_path: Path, endpoint: str) -> None:
    path = pipeline_file(
        tmp_path,
        "pipeline: two\nstages:\n  first: {engine: fake, function: source}\n"
        "  second: {engine: fake, function: relay, model: ${WEIGHTS}}\nedges: [{from: first, to: second}]\n"
        "outputs: {out: second}\n",
    )
    environment = {**os.environ, "WEIGHTS": "/nowhere"}
    missing = _run([*COMMAND, "serve", "stage", *_options(path, endpoint)], environment)
    assert missing.returncode == ExitCode.USAGE
    assert "model '/nowhere' is missing" in " ".join(missing.stderr.split())
    with _serving("stage", *_options(path, endpoint, stage="first"), environment=environment):
        _await_health(endpoint, "stagemesh.v1.StageService")


def test_a_media_service_is_as_the_file_describes_it(tmp_path: Path, endpoint: str, health_endpoint: str) -> None:
    text = "pipeline: one\nstages:\n  first: {engine: fake, function: source}\noutputs: {out: first}\n"
    path = pipeline_file(tmp_path, f"{text}media: {{store: {tmp_path / 'store'}}}\n")
    options = ["--pipeline", str(path), "--listen", endpoint, "--name", "media-pod"]
    with _serving("media", *options, "--health-listen", health_endpoint):
        _await_health(endpoint, "")
    folder = str(issue(tmp_path, "orchestrator/main"))
    with _serving("media", *options, "--tls", folder, "--health-listen", health_endpoint):
        _await_health(health_endpoint, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give CONFIG, or --pipeline"),
        (["config.json", "--replica", "a"], "give either CONFIG or --replica, not both"),
        (["--pipeline", "tiny.yaml", "--replica", "a"], "--stage and --listen: it is required with --pipeline"),
        (["--replica", "a"], "give CONFIG, or --pipeline"),
    ],
)
def test_a_stage_is_configured_in_exactly_one_way(arguments: list[str], message: str) -> None:
    ran = _run([*COMMAND, "serve", "stage", *arguments], {**os.environ, "COLUMNS": "200"})
    assert (ran.returncode, message in ran.stderr) == (ExitCode.USAGE, True), ran.stderr


def test_an_unknown_stage_is_named_with_those_of_the_file(tiny: Path, endpoint: str) -> None:
    ran = _run([*COMMAND, "serve", "stage", *_options(tiny, endpoint, stage="third")])
    assert ran.returncode == ExitCode.USAGE
    assert "has no stage 'third'; its stages are first, second" in ran.stderr.replace("\n", " ")


def _run(command: list[str], environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=environment)
