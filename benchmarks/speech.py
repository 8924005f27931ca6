"""Measures the speech pipeline: streamed edges against whole ones, and services against the same parts in one process.

The baselines, measured in the same run in alternation, are the pipeline with `chunk: whole` on every edge, and
`benchmarks.local`, which connects the same engines, transform and chunking by queues in one process. Each figure is the
median over the repeats of the ratio within a repeat.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.local import LocalPipeline
from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient, Result
from stagemesh.pipeline import load_pipeline

PROMPT = "Explain in four short sentences why the sky is blue."
SEED = 7
MAX_TOKENS = 120
# The frames of a whole answer are one chunk of tens of megabytes, and a chunk may take half of the arena.
WHOLE = {"edges.*.chunk": "whole", "stages.*.data_plane.arena_bytes": str(256 << 20)}

_console = Console(stderr=True)


@dataclass(frozen=True)
class Run:
    """The results of one request."""

    first_text_s: float
    first_audio_s: float
    total_s: float


@dataclass(frozen=True)
class Repeat:
    """The same request over the three ways."""

    streamed: Run
    whole: Run
    local: Run


async def _start(stack: AsyncExitStack, overrides: dict[str, str]) -> AsyncClient:
    pipeline = load_pipeline("speech", overrides=overrides)
    launcher = Launcher(pipeline, listen="127.0.0.1:0", overrides=overrides)
    await stack.enter_async_context(launcher.running())
    await launcher.wait_ready()
    return await stack.enter_async_context(AsyncClient(launcher.endpoint))


async def _ask(client: AsyncClient) -> Run:
    result: Result = await client.generate(PROMPT, seed=SEED, max_tokens=MAX_TOKENS).result()
    assert result.first_text_s is not None, "the pipeline must give text"
    assert result.first_audio_s is not None, "the pipeline must give audio"
    return Run(result.first_text_s, result.first_audio_s, result.total_s)


async def _ask_local(local: LocalPipeline) -> Run:
    run = await local.run(PROMPT, seed=SEED, max_tokens=MAX_TOKENS)
    return Run(run.first_text_s, run.first_audio_s, run.total_s)


async def measure(repeats: int) -> list[Repeat]:
    """Starts all three ways, warms each up and measures them in turn."""
    async with AsyncExitStack() as stack:
        streamed = await _start(stack, {})
        whole = await _start(stack, WHOLE)
        local = await stack.enter_async_context(LocalPipeline.started())
        runs: list[Repeat] = []
        for number in range(repeats + 1):
            runs.append(Repeat(await _ask(streamed), await _ask(whole), await _ask_local(local)))
            _console.print(f"repeat {number} of {repeats}{' (warm-up, not counted)' if not number else ''}: {runs[-1]}")
        return runs[1:]


def figures(repeats: Sequence[Repeat]) -> list[Figure]:
    """Returns the medians."""
    median = statistics.median
    return [
        Figure(
            "first audio, streamed / whole edges",
            median(one.streamed.first_audio_s / one.whole.first_audio_s for one in repeats),
            "ratio",
            "<=0.5",
        ),
        Figure(
            "whole request, services / one process",
            median(one.streamed.total_s / one.local.total_s for one in repeats),
            "ratio",
            "<=1.15",
        ),
        Figure("first text, streamed", median(one.streamed.first_text_s for one in repeats), "s"),
        Figure("first audio, streamed", median(one.streamed.first_audio_s for one in repeats), "s"),
        Figure("first audio, one process", median(one.local.first_audio_s for one in repeats), "s"),
        Figure("first audio, whole edges", median(one.whole.first_audio_s for one in repeats), "s"),
        Figure("whole request, services", median(one.streamed.total_s for one in repeats), "s"),
        Figure("whole request, one process", median(one.local.total_s for one in repeats), "s"),
    ]


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    report("speech", figures(asyncio.run(measure(arguments.repeats))), json_file=arguments.json)


if __name__ == "__main__":
    main()
