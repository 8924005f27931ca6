"""Runs the repository's own tools from its root."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES: tuple[str, ...] = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
)
"""The folders of the source roots. Each contains a part of the namespace package `stagemesh`."""
_BIN = Path(sys.executable).parent


def run(*command: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    """Returns the standard output of a command, which is looked up first in this interpreter's folder.

    Fails the test if the command fails. `environment` is by default the environment of this process.
    """
    environment = environment or {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def git(repository: Path, *arguments: str) -> None:
    """Runs git in a repository of a test, with the identity that commits need."""
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    command = ["git", *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=repository)
