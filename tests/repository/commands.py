"""Runs the repository's own tools from its root."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES: tuple[str, ...] = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
)
"""The folders of the source roots. Each contains a part of the namespace package `stagemesh`."""
_BIN = Path(sys.executable).parent


def run(*command: str) -> str:
    """Returns the standard output of a command, which is looked up first in this interpreter's folder.

    Fails the test if the command fails.
    """
    environment = {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout
