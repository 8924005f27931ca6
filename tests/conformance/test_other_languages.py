"""The stages in TypeScript and C++ pass the cases of `stagemesh conformance`, which find defects in copies of them."""

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.children import running_process
from tests.conformance.stages import check, count, failures
from tests.cpp.programs import command_of
from tests.typescript.nodes import EXAMPLE, ROOT

CHANGED = {"cpp": "upper", "typescript": "stage/steps.js"}
"""The file of a stage that a defect changes, next to its program."""


@asynccontextmanager
async def running(*command: str) -> AsyncGenerator[str]:
    """Runs a stage that prints its port in its first line, and yields its endpoint."""
    arguments = ("--pipeline", "p", "--generation", "g", "--replica", "m-0")
    async with running_process(*command, *arguments, stdout=PIPE, stderr=DEVNULL) as process:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        reading = asyncio.create_task(process.stdout.read())
        try:
            yield f"127.0.0.1:{line.split()[-1]}"
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("language", CHANGED)
async def test_stage_passes_all_cases(language: str) -> None:
    async with running(*command_of(language)) as endpoint:
        results = await check(endpoint)
    assert failures(results) == {}
    assert count(results) >= 300


_DEFECTS = {
    "steps.exists": (b"STEP_EXISTS", b"STEP_EXISTZ"),
    "steps.stale-attempt": (b"STALE_ATTEMPT", b"STALE_ATTEMPZ"),
}
"""The bytes that a defect replaces, by the case that finds it."""


@pytest.mark.parametrize("case", _DEFECTS)
@pytest.mark.parametrize("language", CHANGED)
async def test_defect_in_a_copy_is_found(tmp_path: Path, language: str, case: str) -> None:
    *runner, program = command_of(language)
    ignored = shutil.ignore_patterns("CMakeFiles", "generated")
    folder = shutil.copytree(Path(program).parent, tmp_path / "dist", ignore=ignored)
    # By these, a program in TypeScript finds its packages.
    shutil.copy(EXAMPLE / "package.json", tmp_path)
    (tmp_path / "node_modules").symlink_to(ROOT / "node_modules")
    copy = folder / CHANGED[language]
    copy.write_bytes(copy.read_bytes().replace(*_DEFECTS[case]))
    async with running(*runner, str(folder / Path(program).name)) as endpoint:
        assert list(failures(await check(endpoint, case))) == [case]
