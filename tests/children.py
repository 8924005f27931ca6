"""Child processes of the tests: how they start, what they log, and how they end."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, AnyStr

import psutil

from stagemesh.common.process.config import ProcessConfig, dump_config


def config_command(module: str, config: ProcessConfig, path: Path, *, python: str = sys.executable) -> list[str]:
    """Writes a config file, and returns the command of the process of a module that reads it."""
    path.write_bytes(dump_config(config))
    return [python, "-m", module, "--config", str(path)]


@contextmanager
def killed_at_end(process: "subprocess.Popen[AnyStr]") -> Iterator["subprocess.Popen[AnyStr]"]:
    """Yields a process. Kills it at the end of the block, waits until it has ended, and closes its pipes."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def running_process(*command: str, **pipes: Any) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Runs a process in this event loop. Kills it at the end of the block if it still runs, and closes its pipes."""
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def read_endpoint(process: "subprocess.Popen[str]") -> str:
    """Reads the log of a stage process from its standard error until it listens. Returns its endpoint."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"listening on (\S+)", line):
            return found[1]
    raise AssertionError(f"the process never logged where it listens:\n{''.join(lines)}")


def commands_of_children(process: psutil.Process) -> dict[psutil.Process, str]:
    """Returns the running children with their command lines. Skips zombies."""
    found = dict[psutil.Process, str]()
    # Children may start and end meanwhile.
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            # psutil raises NoSuchProcess for a zombie too, because it has no command line.
            found[child] = " ".join(child.cmdline())
    return found
