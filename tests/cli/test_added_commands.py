"""Tests of commands that packages add to the command line by entry points."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from stagemesh.cli import app
from stagemesh.common.errors import ExitCode
from tests.cli.commands import invoke

GROUP = "stagemesh.commands"
ADDED = [
    EntryPoint("shout", f"{__name__}:shout", GROUP),
    EntryPoint("version", f"{__name__}:shout", GROUP),
    EntryPoint("whisper", f"{__name__}:missing", GROUP),
]


def shout(text: str) -> None:
    """Print TEXT in capitals."""
    print(text.upper())


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(app, "entry_points", lambda group: ADDED if group == GROUP else [])
    app._added.cache_clear()
    yield
    app._added.cache_clear()


def test_an_added_command_runs_and_has_help() -> None:
    assert invoke("shout", "hello").stdout == "HELLO\n"
    assert "Print TEXT in capitals." in invoke("shout", "-h").stdout


def test_an_added_command_does_not_replace_one_of_stagemesh() -> None:
    assert "stagemesh" in invoke("version").stdout


def test_a_command_that_cannot_be_imported_is_named_when_it_is_called() -> None:
    assert "shout" in invoke("--help").stdout
    invoke("whisper").check(ExitCode.REFUSED, "the command 'whisper' cannot be imported", "remove its package")
