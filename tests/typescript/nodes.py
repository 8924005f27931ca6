"""Programs in TypeScript (examples/typescript) and JavaScript as child processes of a test."""

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.children import running_process

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "typescript"
PACKAGE = ROOT / "clients" / "typescript"


def require_programs() -> None:
    """Skips a test without node. Fails it if the programs are not built, or older than their sources."""
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm: install Node.js 20 or later, then run `make typescript`")
    stamp, patterns = EXAMPLE / "dist" / ".stamp", ("src/*.ts", "src/stage/*.ts", "src/session/*.ts")
    sources = [source for folder in (EXAMPLE, PACKAGE) for pattern in patterns for source in folder.glob(pattern)]
    is_built = stamp.exists() and all(source.stat().st_mtime <= stamp.stat().st_mtime for source in sources)
    assert is_built, "clients/typescript or examples/typescript is not built: run `make typescript`"


def node() -> str:
    """Returns the path of Node.js."""
    found = shutil.which("node")
    assert found is not None, "the tests in this folder are skipped without node"
    return found


def program(name: str) -> tuple[str, str]:
    """Returns the command of a program of the example."""
    return node(), str(EXAMPLE / "dist" / f"{name}.js")


class RunningClient:
    """The client in TypeScript, which runs one request."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def __aiter__(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields the kind and the content of each event."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            event = json.loads(line)
            yield event["$case"], event["value"]

    async def error(self) -> str:
        """Returns what a client that fails prints."""
        _, error = await self.process.communicate()
        assert self.process.returncode == 1
        return error.decode()


@asynccontextmanager
async def running_client(endpoints: str, prompt: str, *arguments: str) -> AsyncIterator[RunningClient]:
    """Runs a request. Kills the client if it still runs at the end."""
    command = (*program("generate"), "--json", *arguments, endpoints, prompt)
    async with running_process(*command, stdout=PIPE, stderr=PIPE, limit=16 << 20) as process:
        yield RunningClient(process)
