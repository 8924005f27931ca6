"""Runs `stagemesh` in this process or in a process of its own."""

import asyncio
import sys
from dataclasses import dataclass

from typer.testing import CliRunner

from stagemesh.cli.app import app

COMMAND = (sys.executable, "-m", "stagemesh.cli.app")


@dataclass(frozen=True)
class Ran:
    """The exit status and the output of a command."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(*arguments: str) -> Ran:
    """Runs a command in this process. The command must not need an event loop."""
    result = CliRunner().invoke(app, list(arguments))
    return Ran(result.exit_code, result.stdout, result.stderr)


async def stagemesh(*arguments: str, stdin: str = "") -> Ran:
    """Runs a command in a process of its own, and waits until it ends."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    stdout, stderr = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ran(process.returncode, stdout.decode(), stderr.decode())
