"""The start of a stage process, and all the ways in which it ends."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from stagemesh.common.errors import ExitCode
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.children import config_command, killed_at_end, read_endpoint
from tests.rpc.health_calls import Response, read_status, wait_status
from tests.stage.replicas import stage_config, step_request

LIMIT_S = 20


def test_sigterm_lets_a_running_step_finish(tmp_path: Path) -> None:
    with _serving(stage_config(steps=10, step_s=0.05), tmp_path) as replica:
        assert _kind_after_sigterm(replica) == "finished"


def test_the_time_limit_for_the_end_includes_the_time_for_running_steps(tmp_path: Path) -> None:
    config = replace(stage_config(steps=30, step_s=0.1), drain_s=LIMIT_S)
    # Without the time for running steps, the process would end a second after SIGTERM.
    program = "from stagemesh.services.stage import process; process._END_S = 1; import runpy; "
    program += "runpy.run_module('stagemesh.services.stage', run_name='__main__')"
    command = [sys.executable, "-c", program, *_write(config, tmp_path)[3:]]
    with _serving(config, tmp_path, command) as replica:
        assert _kind_after_sigterm(replica) == "finished"


def test_steps_that_are_still_running_after_the_drain_are_handed_over(tmp_path: Path) -> None:
    with _serving(replace(stage_config(steps=1000, step_s=0.1), drain_s=0.5), tmp_path) as replica:
        assert _kind_after_sigterm(replica) == "paused"


def test_a_step_that_was_planned_before_sigterm_is_accepted(tmp_path: Path) -> None:
    with _serving(stage_config(steps=2), tmp_path) as replica:
        load_reports = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest())
        next(load_reports)
        replica.process.send_signal(signal.SIGTERM)
        wait_status(replica.channel, status=Response.NOT_SERVING, timeout_s=LIMIT_S)
        assert replica.stub.Describe(stage_pb2.DescribeRequest()).state == stage_pb2.REPLICA_STATE_DRAINING
        assert [event.WhichOneof("event") for event in replica.stub.ExecuteStep(step_request())][-1] == "finished"


def test_a_replica_is_ready_for_a_rollout_only_while_an_orchestrator_releases_it(tmp_path: Path) -> None:
    with _serving(stage_config(), tmp_path) as replica:
        assert _health(replica.channel, "thinker") == Response.NOT_SERVING
        released = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(verdict=stage_pb2.ROLLOUT_VERDICT_RELEASED))
        next(released)
        assert _health(replica.channel, "thinker") == Response.SERVING
        withheld = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(verdict=stage_pb2.ROLLOUT_VERDICT_WITHHELD))
        next(withheld)
        assert _health(replica.channel, "thinker") == Response.NOT_SERVING
        assert _health(replica.channel, "stagemesh.v1.StageService") == Response.SERVING
        replica.process.send_signal(signal.SIGTERM)


def test_a_loading_process_is_live_but_not_ready(tmp_path: Path) -> None:
    with _started(stage_config(start_s=30), tmp_path) as replica:
        assert _health(replica.channel, "liveness") == Response.SERVING
        for facet in ("", "stagemesh.v1.StageService"):
            assert _health(replica.channel, facet) == Response.NOT_SERVING
        description = replica.stub.Describe(stage_pb2.DescribeRequest())
        assert (description.state, description.detail) == (stage_pb2.REPLICA_STATE_LOADING, "loading the fake engine")
        replica.process.send_signal(signal.SIGTERM)


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, log = _run(replace(stage_config(), listen=f"127.0.0.1:{port}"), tmp_path)
    assert status == ExitCode.REFUSED
    assert len([line for line in log.splitlines() if "ERROR" in line]) == 1
    assert f"port {port} of 127.0.0.1: it is in use" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("config", "code", "line"),
    [
        (stage_config(colour=1), ExitCode.USAGE, "stage thinker: unknown option 'colour'"),
        (stage_config(function="poet"), ExitCode.NOT_FOUND, "unknown function 'poet' of the fake engine"),
        (replace(stage_config(), engine="steam"), ExitCode.NOT_FOUND, "unknown engine 'steam'"),
    ],
)
def test_a_failed_start_reports_the_cause(config: StageConfig, code: ExitCode, line: str, tmp_path: Path) -> None:
    status, log = _run(config, tmp_path)
    assert status == code
    assert line in log
    assert "Traceback" not in log


def test_bad_config_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    path.write_text('{"pipeline": 1}')
    result = subprocess.run(_command(path), capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode == 2
    assert "stage.json" in result.stderr
    assert "Traceback" not in result.stderr
    path.unlink()
    result = subprocess.run(_command(path), capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (result.returncode, result.stderr) == (2, f"{path} cannot be read: No such file or directory\n")


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "stagemesh.services.stage", "--config", str(path)]


def _write(config: StageConfig, folder: Path) -> list[str]:
    return config_command("stagemesh.services.stage", config, folder / "stage.json")


def _run(config: StageConfig, folder: Path) -> tuple[int, str]:
    result = subprocess.run(_write(config, folder), capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return result.returncode, result.stderr


class _Replica(NamedTuple):
    """A stage process, and the connection to it."""

    process: "subprocess.Popen[str]"
    channel: grpc.Channel

    @property
    def stub(self) -> "stage_pb2_grpc.StageServiceStub":
        return stage_pb2_grpc.StageServiceStub(self.channel)


@contextmanager
def _started(config: StageConfig, folder: Path, command: list[str] | None = None) -> Iterator[_Replica]:
    """Starts a process, which must end with status 0 by itself at the end of the block."""
    command = command or _write(config, folder)
    with (
        killed_at_end(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process,
        grpc.insecure_channel(read_endpoint(process)) as channel,
    ):
        yield _Replica(process, channel)
        assert process.wait(LIMIT_S) == 0


@contextmanager
def _serving(config: StageConfig, folder: Path, command: list[str] | None = None) -> Iterator[_Replica]:
    """Starts a process like `_started`, and yields when it serves."""
    with _started(config, folder, command) as replica:
        wait_status(replica.channel, timeout_s=LIMIT_S)
        yield replica


def _kind_after_sigterm(replica: _Replica) -> str | None:
    """Sends SIGTERM while a step runs, and returns the kind of the step's last event."""
    events = replica.stub.ExecuteStep(step_request())
    assert next(events).WhichOneof("event") == "accepted"
    replica.process.send_signal(signal.SIGTERM)
    return [event.WhichOneof("event") for event in events][-1]


def _health(channel: grpc.Channel, facet: str) -> int:
    return read_status(channel, facet, timeout_s=LIMIT_S)
