"""Tests that one line tells a user what a machine lacks and what to do."""

import sys
from pathlib import Path

import pytest

from tools import preflight


def test_this_machine_lacks_nothing() -> None:
    assert preflight.problem() is None


def test_another_python_is_named_with_the_needed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    found = preflight.problem()
    assert found is not None
    assert f"{sys.executable} is 3.10" in found
    assert "run make with PYTHON=python3.11" in found


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert preflight.problem() == "programs are missing; install the packages coreutils git grep sed"


def test_a_home_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path / "file"))
    found = preflight.problem()
    assert found is not None
    assert "cannot be written to" in found
    assert found.endswith("set STAGEMESH_HOME to a folder for models and logs")


def test_optional_programs_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["preflight.py", "packages-check"])
    monkeypatch.setattr(preflight, "is_installed", lambda program: program != "npm")
    assert preflight.main() == 0
    message = "npm is not installed: tests of the client in TypeScript are skipped; install Node.js 20 or newer\n"
    assert capsys.readouterr().err == message
