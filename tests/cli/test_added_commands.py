"""Tests of commands that packages add to the command line by entry points."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import typer

from stagemesh.cli.terminal import command_groups
from stagemesh.common.errors import ExitCode
from tests.cli.commands import invoke

GROUP = "stagemesh.commands"
ADDED = [
    EntryPoint("shout", f"{__name__}:shout", GROUP),
    EntryPoint("version", f"{__name__}:shout", GROUP),
    EntryPoint("models.shout", f"{__name__}:shout", GROUP),
    EntryPoint("models.list", f"{__name__}:shout", GROUP),
    EntryPoint("farm", f"{__name__}:FARM", GROUP),
    EntryPoint("whisper", f"{__name__}:missing", GROUP),
]


def shout(text: str) -> None:
    """Print TEXT in capitals."""
    print(text.upper())


FARM = typer.Typer()


@FARM.command()
def cow() -> None:
    """Print MOO."""
    print("MOO")


@FARM.command()
def dog() -> None:
    """Print WOOF."""
    print("WOOF")


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(command_groups, "entry_points", lambda group: ADDED if group == GROUP else [])
    command_groups._entries.cache_clear()
    yield
    command_groups._entries.cache_clear()


def test_an_added_command_runs_and_has_help() -> None:
    assert invoke("shout", "hello").stdout == "HELLO\n"
    assert "Print TEXT in capitals." in invoke("shout", "-h").stdout


def test_a_command_is_added_to_a_group() -> None:
    assert invoke("models", "shout", "hello").stdout == "HELLO\n"
    assert "shout" in invoke("models", "-h").stdout
    assert "folder" in invoke("models", "list").stdout


def test_a_group_is_added() -> None:
    assert invoke("farm", "dog").stdout == "WOOF\n"
    assert "cow" in invoke("farm", "-h").stdout
    assert "farm " in invoke("--help").stdout


def test_an_added_command_does_not_replace_one_of_stagemesh() -> None:
    assert "stagemesh" in invoke("version").stdout


def test_a_command_that_cannot_be_imported_is_named_when_it_is_called() -> None:
    assert "shout" in invoke("--help").stdout
    invoke("whisper").check(ExitCode.REFUSED, "the command 'whisper' cannot be imported", "remove its package")
