"""Programs in TypeScript (examples/typescript) as child processes of a test."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "typescript"
QUICK = ("--window-bytes", "65536", "--welcome-ms", "500", "--silence-ms", "300")
"""A small window of credit, and a short time before a silent flow is opened again."""


def program(name: str) -> tuple[str, str]:
    """Returns the command of a program of the example."""
    node = shutil.which("node")
    assert node is not None, "the tests in this folder are skipped without node"
    return node, str(EXAMPLE / "dist" / f"{name}.js")


@dataclass(frozen=True)
class RunningStage:
    """A replica of the stage in TypeScript."""

    endpoint: str
    process: asyncio.subprocess.Process


@asynccontextmanager
async def running_stage(*arguments: str) -> AsyncIterator[RunningStage]:
    """Runs the replica "m-0" of the stage in TypeScript, and stops it by SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        *program("upper"), "--replica", "m-0", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        yield RunningStage(f"127.0.0.1:{line.split()[-1]}", process)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(15):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
    assert status == 0, f"the stage ended with status {status}"
