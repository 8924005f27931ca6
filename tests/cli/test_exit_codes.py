"""Runs commands as processes, and checks that scripts can tell their failures apart."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from stagemesh.cli.terminal.error_output import show_error
from stagemesh.common.errors import (
    CancelledRequestError,
    ExistsError,
    ExitCode,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from tests.cli.commands import invoke, stagemesh, start
from tests.client.scripted import Pause, ScriptedOrchestrator, admitted, text

CLI = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("a defect"), ExitCode.FAILED),
        (UnsupportedError("not in this engine"), ExitCode.FAILED),
        (CancelledRequestError("by an operator"), ExitCode.FAILED),
        (InvalidRequestError("no prompt"), ExitCode.USAGE),
        (NotFoundError("no such adapter"), ExitCode.NOT_FOUND),
        (UnavailableError("a stage is gone"), ExitCode.UNAVAILABLE),
        (ExistsError("the id is in use"), ExitCode.REFUSED),
        (NotReadyError("the stage sleeps"), ExitCode.REFUSED),
        (OverloadedError("too large"), ExitCode.REFUSED),
    ],
)
async def test_errors_have_codes(error: StagemeshError, code: ExitCode, orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), error])
    ran = await stagemesh("generate", "hello", "--server", orchestrator.endpoint)
    assert (ran.exit_code, error.message in ran.stderr) == (code, True)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("stages", "--fly"), ExitCode.USAGE),
        (("stages", "--server", "nowhere"), ExitCode.USAGE),
        (("pipeline", "validate", "spech"), ExitCode.NOT_FOUND),
        (("stages", "--server", "127.0.0.1:1"), ExitCode.UNAVAILABLE),
        (("admin", "stages", "--server", "127.0.0.1:1"), ExitCode.UNAVAILABLE),
        (("admin", "wait", "--timeout", "0.1", "--server", "127.0.0.1:1"), ExitCode.TIMEOUT),
    ],
)
async def test_a_command_without_a_server_has_its_code(arguments: Sequence[str], code: ExitCode) -> None:
    ran = await stagemesh(*arguments)
    assert (ran.exit_code, "Traceback" in ran.stderr) == (code, False)


async def test_a_request_that_exceeds_its_time_limit_is_a_timeout(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    ran = await stagemesh("generate", "hello", "--server", orchestrator.endpoint, "--timeout", "0.5")
    assert ran.exit_code == ExitCode.TIMEOUT


async def test_ctrl_c_has_a_code_of_its_own(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), Pause.FOREVER])
    process = await start("generate", "hello", "--server", orchestrator.endpoint)
    assert process.stdout is not None
    assert await process.stdout.readexactly(2) == b"Hi"
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED


async def test_a_usage_error_can_be_printed_as_json() -> None:
    ran = await stagemesh("stages", "--fly", "--json")
    error = json.loads(ran.stderr)["error"]
    assert (ran.exit_code, error["code"], error["reason"]) == (ExitCode.USAGE, "INVALID_ARGUMENT", "INVALID_REQUEST")
    assert "--fly" in error["message"]


def test_the_help_and_the_documentation_list_every_code() -> None:
    shown, document = " ".join(invoke("--help").stdout.split()), CLI.read_text()
    for code in ExitCode:
        assert f" {code.value} " in shown
        assert f"| {code.value} |" in document


@pytest.mark.parametrize(
    ("error", "command"),
    [
        (
            InternalError("it raised; the log of this replica has the traceback", metadata={"replica": "voice-0"}),
            "stagemesh logs voice-0",
        ),
        (InternalError("the orchestrator failed; its log has the details"), "stagemesh logs"),
        (InternalError("the catalogue is logical"), ""),
    ],
)
def test_a_mentioned_log_has_a_command(error: InternalError, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_error(error, as_json=True)
    remedy = json.loads(capsys.readouterr().err)["error"]["remedy"]
    assert remedy.startswith(f"`{command}`" if command else "")
    assert bool(remedy) == bool(command)
