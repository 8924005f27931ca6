"""Stage processes for `stagemesh conformance`, and the runs of its cases against them."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from stagemesh.common.process.stage_process import StageConfig
from stagemesh.stage_conformance.cases import Result, Verdict, select
from stagemesh.stage_conformance.driver import Settings, check_stage
from stagemesh.stage_conformance.suites import register_cases
from tests.children import config_command, running_process

register_cases()
SLOW = ("producer.nobody-listens",)
"""The cases that take more than ten seconds."""
START_S = 20


@asynccontextmanager
async def python_stage(
    folder: Path, function: str, *, engine: str = "fake", defect: str = "", tls: str | None = None
) -> AsyncGenerator[str]:
    """Runs a stage in Python, and yields its endpoint. `defect` is a program that runs before the stage's own."""
    config = StageConfig(
        pipeline="p",
        generation="g",
        stage=function,
        replica=f"{function}-0",
        engine=engine,
        function=function,
        listen="127.0.0.1:0",
        tls=tls,
    )
    module = "stagemesh.services.stage"
    command = config_command(module, config, folder / f"{function}.json")
    if defect:
        program = f"{defect}\nimport runpy\nrunpy.run_module({module!r}, run_name='__main__')"
        command = [sys.executable, "-c", program, *command[3:]]
    async with running_process(*command, stderr=PIPE) as process:
        assert process.stderr is not None
        endpoint = ""
        async with asyncio.timeout(START_S):
            while not (line := (await process.stderr.readline()).decode()).endswith(": ready\n"):
                assert line, "the stage ended while it was started"
                if found := re.search(r"listening on (\S+)", line):
                    endpoint = found[1]
        # The stage would wait if nothing read its log.
        reading = asyncio.create_task(process.stderr.read())
        try:
            yield endpoint
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def check(
    endpoint: str, *patterns: str, level: int = 3, settings: Settings | None = None, without: Collection[str] = SLOW
) -> dict[str, Result]:
    """Runs the cases that match the patterns, or all, except the cases in `without`. Returns their results by name."""
    left_out = {each.name for each in select([*without])}
    cases = [each for each in select(patterns) if each.level <= level and each.name not in left_out]
    outcome = await check_stage(endpoint, cases, settings or Settings(), lambda result, count: None)
    return {each.case.name: each for each in outcome.results}


def failures(results: dict[str, Result]) -> dict[str, str]:
    """Returns what the failed cases expected and what came, by name."""
    failed = (each for each in results.values() if each.verdict is Verdict.FAILED)
    return {each.case.name: f"expected {each.expected}; came {each.came}" for each in failed}


def count(results: dict[str, Result], verdict: Verdict = Verdict.PASSED) -> int:
    """Returns how many cases have this verdict."""
    return sum(each.verdict is verdict for each in results.values())
