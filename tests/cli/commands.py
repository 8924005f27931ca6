"""Runs `stagemesh` in this process, or in its own process."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from typer.testing import CliRunner

from stagemesh.cli.app import app
from stagemesh.rpc.credentials import PROCESS

COMMAND = (sys.executable, "-m", "stagemesh.cli")


@dataclass(frozen=True)
class Ran:
    """The exit status and the output of a command."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error_text(self) -> str:
        """Standard error on one line, without the frame around usage errors."""
        return " ".join(self.stderr.replace("│", " ").split())

    @property
    def output(self) -> str:
        """Standard output. Asserts that the command has succeeded."""
        self.check(0)
        return self.stdout

    def check(self, code: int, *words: str) -> None:
        """Asserts the exit status, and that standard error contains the words."""
        assert (self.exit_code, [each for each in words if each not in self.error_text]) == (code, []), self.stderr


def invoke(*arguments: str, stdin: str = "") -> Ran:
    """Runs a command in this process, and in this thread, in which no event loop may run.

    Restores the environment and the credentials of this process, which a command may set. Raises what the command
    raises, unless the command reports it itself.
    """
    credentials = PROCESS.credentials
    try:
        with mock.patch.dict(os.environ):
            result = CliRunner().invoke(app, list(arguments), input=stdin)
    finally:
        PROCESS.use(credentials)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


async def stagemesh(*arguments: str, stdin: str = "") -> Ran:
    """Runs a command in a thread of this process, while the servers of the test run. One command at a time."""
    return await asyncio.to_thread(invoke, *arguments, stdin=stdin)


async def start(*arguments: str, program: Sequence[str] = COMMAND) -> asyncio.subprocess.Process:
    """Starts a command in a process of its own, with pipes to its standard streams."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*program, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)


async def run_process(*arguments: str, stdin: str = "", program: Sequence[str] = COMMAND) -> Ran:
    """Runs a command in its own process, and waits until it ends. `program` starts `stagemesh`."""
    process = await start(*arguments, program=program)
    stdout, stderr = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ran(process.returncode, stdout.decode(), stderr.decode())
