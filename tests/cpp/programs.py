"""The stage in C++ (examples/cpp), and the one in TypeScript, as child processes of a test."""

import asyncio
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.children import running_process
from tests.typescript.nodes import program, require_programs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cpp"
UPPER = EXAMPLE / "build" / "upper"
QUICK = ("--window-bytes", "65536", "--welcome-ms", "500", "--silence-ms", "300", "--accepting-ms", "500")
"""A small window of credit, and short times until a silent flow is opened again and the drain rejects steps."""


def require_stage() -> None:
    """Skips a test without the packages of C++. Fails it if the stage is not built, or older than its sources."""
    if shutil.which("grpc_cpp_plugin") is None or shutil.which("cmake") is None:
        pytest.skip("needs g++, cmake, and gRPC for C++: run `make cpp` as root on Debian")
    stamp = EXAMPLE / "build" / ".stamp"
    sources = [*EXAMPLE.glob("src/*"), EXAMPLE / "CMakeLists.txt"]
    is_built = stamp.exists() and all(source.stat().st_mtime <= stamp.stat().st_mtime for source in sources)
    assert is_built, "examples/cpp is not built: run `make cpp`"


def command_of(language: str) -> tuple[str, ...]:
    """Returns the command of a stage. Skips the test if the programs for its language are missing."""
    if language == "typescript":
        require_programs()
        return program("upper")
    require_stage()
    return (str(UPPER),)


@asynccontextmanager
async def running_stage(language: str, *arguments: str) -> AsyncGenerator[tuple[str, asyncio.subprocess.Process]]:
    """Runs the replica "m-0" of the pipeline "p". Yields its endpoint and its process, and stops it by SIGTERM."""
    names = ("--pipeline", "p", "--generation", "g", "--replica", "m-0")
    command = (*command_of(language), *names, *QUICK, *arguments)
    async with running_process(*command, stdout=PIPE) as process:
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode()
            yield f"127.0.0.1:{line.split()[-1]}", process
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            async with asyncio.timeout(15):
                status = await process.wait()
    assert status == 0, f"the stage ended with status {status}"
