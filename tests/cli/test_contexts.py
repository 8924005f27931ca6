"""Tests the file of named contexts, and which address a command connects to."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stagemesh.cli.terminal.connection_options import ADMIN_SERVER, SERVER
from stagemesh.cli.terminal.contexts import Context, Contexts, contexts_path, load_contexts, save_contexts
from stagemesh.cli.terminal.error_output import ErrorGroup
from stagemesh.cli.terminal.options import Parameter, with_parameters
from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke, stagemesh
from tests.client.scripted import ScriptedOrchestrator

REST = '"admin": "", "tls": "", "token_file": ""'
"""The members of a context but its server, in a file."""
ADMIN = ("--admin", "here:2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty folder in which the file of contexts is created."""
    for name in ("STAGEMESH_SERVER", "STAGEMESH_ADMIN_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "stagemesh"


def _address(parameters: Mapping[str, Parameter], *arguments: str) -> Ran:
    """Returns what a command with these parameters would connect to."""
    app = typer.Typer(cls=ErrorGroup)

    def connect(**values: Any) -> None:
        typer.echo(values.get("server") or values.get("admin_server"))

    app.command()(with_parameters(parameters)(connect))
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["connect", *arguments])
    return Ran(result.exit_code, result.stdout.strip(), result.stderr)


def test_a_context_is_added_listed_shown_and_removed() -> None:
    assert invoke("context", "add", "here", "--server", "a:1,b:1", *ADMIN).exit_code == 0
    assert invoke("context", "list").stdout.split()[3:] == ["here", "a:1,b:1", "here:2"]
    assert invoke("context", "use", "here").stdout == "here (current): server a:1,b:1, admin here:2\n"
    assert str(contexts_path()) in invoke("context", "show").stdout
    assert invoke("context", "remove", "here").exit_code == 0
    assert load_contexts() == Contexts()


def test_contexts_can_be_printed_as_json() -> None:
    added = invoke("context", "add", "here", "--server", "a:1", "--json")
    document = {"context": "here", "server": "a:1", "admin": "", "tls": "", "token_file": "", "current": False}
    assert json.loads(added.stdout) == document
    assert json.loads(invoke("context", "list", "--json").stdout) == [document]
    assert json.loads(invoke("context", "use", "here", "--json").stdout) == {**document, "current": True}
    assert json.loads(invoke("context", "show", "--json").stdout)["current"] is True
    assert json.loads(invoke("context", "remove", "here", "--json").stdout) == {"context": "here", "removed": True}


def test_only_the_user_can_read_the_file(folder: Path) -> None:
    save_contexts(Contexts({"here": Context("a:1")}))
    assert stat.S_IMODE(contexts_path().stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["contexts.json"]


def test_a_failed_write_keeps_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_contexts(Contexts({"here": Context("a:1")}))

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    invoke("context", "use", "here").check(ExitCode.USAGE, f"{contexts_path()} cannot be written: No space")
    assert load_contexts() == Contexts({"here": Context("a:1")})
    assert [path.name for path in folder.iterdir()] == ["contexts.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("use", "there"), ExitCode.NOT_FOUND, "unknown context 'there'; contexts: here"),
        (("remove", "there"), ExitCode.NOT_FOUND, "stagemesh context list"),
        (("show", "there"), ExitCode.NOT_FOUND, "unknown context"),
        (("show",), ExitCode.NOT_FOUND, "no context is current"),
        (("add", "here", "--server", "a:1"), ExitCode.REFUSED, "context 'here' exists"),
        (("add", "not here", "--server", "a:1"), ExitCode.USAGE, "'not here' is not a name for a context"),
        (("add", "there", "--server", "a"), ExitCode.USAGE, "'a' is not of the form HOST:PORT"),
        (("add", "there", "--server", "a:1", "--admin", "a:2,b:2"), ExitCode.USAGE, "contains several addresses"),
        (("add", "there"), ExitCode.USAGE, "Missing option '--server'"),
    ],
)
def test_a_mistake_is_reported_and_changes_nothing(arguments: tuple[str, ...], code: ExitCode, said: str) -> None:
    before = Contexts({"here": Context("a:1")})
    save_contexts(before)
    invoke("context", *arguments).check(code, said)
    assert load_contexts() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"contexts": {"a": 1}, "current": ""}', "Expected `object`, got `int` - at `$.contexts[...]`"),
        (f'{{"contexts": {{"a": {{"server": "h", {REST}}}}}, "current": ""}}', "'h' is not of the form HOST:PORT"),
        (f'{{"contexts": {{"a": {{"serve": "h:1", {REST}}}}}, "current": ""}}', "missing required field `server`"),
        (f'{{"current": "b", "contexts": {{"a": {{"server": "h:1", {REST}}}}}}}', "'b' does not exist"),
    ],
)
def test_a_damaged_file_is_named(content: str, said: str, folder: Path) -> None:
    folder.mkdir()
    contexts_path().write_text(content)
    _address(SERVER).check(ExitCode.USAGE, f"{contexts_path()} is damaged", said)
    assert invoke("context", "add", "new", "--server", "n:1").exit_code == ExitCode.USAGE
    assert contexts_path().read_text() == content
    assert _address(SERVER, "--server", "n:1").stdout == "n:1"


def test_a_folder_that_cannot_be_read_is_named(folder: Path) -> None:
    folder.write_text("a file instead of a folder")
    assert f"{contexts_path()} cannot be read: Not a directory" in _address(SERVER).stderr


@pytest.mark.parametrize(
    ("parameters", "variable", "default", "current", "other"),
    [
        (SERVER, "STAGEMESH_SERVER", "127.0.0.1:7780", "c:1", "o:1"),
        (ADMIN_SERVER, "STAGEMESH_ADMIN_SERVER", "127.0.0.1:7781", "c:2", "o:2"),
    ],
)
def test_an_option_precedes_the_environment_the_current_context_and_the_default(
    *,
    parameters: Mapping[str, Parameter],
    variable: str,
    default: str,
    current: str,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contexts = Contexts({"current": Context("c:1", "c:2"), "other": Context("o:1", "o:2")})
    save_contexts(contexts)
    assert _address(parameters).stdout == default
    save_contexts(contexts.with_current("current"))
    assert _address(parameters).stdout == current
    monkeypatch.setenv(variable, "e:1")
    assert _address(parameters).stdout == "e:1"
    assert _address(parameters, "--context", "other").stdout == other
    assert _address(parameters, "--server", "s:1").stdout == "s:1"


def test_a_server_and_a_context_exclude_each_other() -> None:
    save_contexts(Contexts({"here": Context("a:1")}))
    ran = _address(SERVER, "--server", "a:1", "--context", "here")
    ran.check(ExitCode.USAGE, "give either --server or --context, not both")


def test_an_empty_context_is_not_the_current_one() -> None:
    save_contexts(Contexts({"here": Context("a:1")}, current="here"))
    assert "unknown context ''" in _address(SERVER, "--context", "").stderr


def test_commands_for_operators_connect_to_one_address() -> None:
    assert "'a:1,b:1' contains several addresses" in _address(ADMIN_SERVER, "--server", "a:1,b:1").stderr


def test_an_operator_never_gets_the_default_of_a_context_without_an_address() -> None:
    save_contexts(Contexts({"here": Context("a:1")}, current="here"))
    _address(ADMIN_SERVER).check(ExitCode.NOT_FOUND, "has no address for operators", "--admin HOST:PORT")


def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_SERVER", "nowhere")
    _address(SERVER).check(ExitCode.USAGE, "STAGEMESH_SERVER")


async def test_commands_connect_to_the_context(orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator) -> None:
    orchestrator.description.pipeline, other.description.pipeline = "one", "two"
    save_contexts(Contexts({"1": Context(orchestrator.endpoint), "2": Context(other.endpoint)}, current="1"))
    assert json.loads((await stagemesh("stages", "--json")).stdout)["pipeline"] == "one"
    assert json.loads((await stagemesh("stages", "--context", "2", "--json")).stdout)["pipeline"] == "two"
