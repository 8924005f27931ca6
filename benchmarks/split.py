"""Measures short requests while long prompts are computed: a split stage against two whole replicas of the same model.

Both are stages of one pipeline, so that both are up at once: one prefill and one decode replica, and two replicas that
do both. Their trials alternate. In a trial, long prompts with a few tokens of output and short prompts with many tokens
of output arrive at fixed intervals, and clients measure when each token arrives. The interval of long prompts is twice
the time that one takes alone, so that the prefill replica computes for half of the time. The first trial of each stage
is a warm-up.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.ar_variants.model_files import LARGER, write_model
from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient, Tokens
from stagemesh.pipeline import load_pipeline

SPLIT, WHOLE = "split", "whole"
LONG_TOKENS, SHORT_TOKENS = 2_000, 24
LONG_OUTPUT, SHORT_OUTPUT = 4, 48
LONG_INTERVALS, SHORT_INTERVAL_S = 2.0, 0.5
TRIAL_S = 20.0
REPEATS = 3
MAX_MODEL_LEN = 2_304
_VOCABULARY = 2_000
_PIPELINE = """\
pipeline: comparison
main_stage: split
stages:
  split:
    engine: vllm
    model: {model}
    options: &options {{load_format: dummy, dtype: float32, kv_cache_memory_bytes: 134217728}}
    split: {{prefill: 1, decode: 1}}
  whole: {{engine: vllm, model: {model}, replicas: 2, options: *options}}
outputs: {{split: split.token_ids, whole: whole.token_ids}}
"""

_console = Console(stderr=True)


@dataclass
class Trial:
    """The times of the requests of one trial, in seconds."""

    first_s: list[float] = field(default_factory=list[float])
    """From each short request to its first token."""
    gaps_s: list[float] = field(default_factory=list[float])
    """From each token of a short request to its next one."""
    long_s: list[float] = field(default_factory=list[float])
    """From each long request to its first token."""


class Comparison:
    """The running pipeline, and prompts that never repeat."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._random = np.random.default_rng(0)
        self._long_interval_s = 0.0

    async def measure_interval(self) -> None:
        """Measures how long a long prompt takes alone, and derives the interval of long prompts from it."""
        times_s = [await self._arrivals(SPLIT, LONG_TOKENS, 1) for _ in range(3)]
        self._long_interval_s = LONG_INTERVALS * min(end_s - start_s for start_s, end_s in times_s)
        _console.print(f"a long prompt every {self._long_interval_s:.2f} s")

    async def run(self, variant: str) -> Trial:
        """Runs one trial in the stage `variant`, and waits until all of its requests have ended."""
        trial = Trial()
        async with asyncio.TaskGroup() as group:
            for interval_s, request in ((self._long_interval_s, self._long), (SHORT_INTERVAL_S, self._short)):
                for number in range(round(TRIAL_S / interval_s)):
                    group.create_task(_after(number * interval_s, request(variant, trial)))
        return trial

    async def _long(self, variant: str, trial: Trial) -> None:
        arrivals_s = await self._arrivals(variant, LONG_TOKENS, LONG_OUTPUT)
        trial.long_s.append(arrivals_s[1] - arrivals_s[0])

    async def _short(self, variant: str, trial: Trial) -> None:
        start_s, *arrivals_s = await self._arrivals(variant, SHORT_TOKENS, SHORT_OUTPUT)
        trial.first_s.append(arrivals_s[0] - start_s)
        trial.gaps_s += np.diff(arrivals_s).tolist()

    async def _arrivals(self, variant: str, prompt_tokens: int, output_tokens: int) -> list[float]:
        """Runs one request. Returns the time of its start and of each arrival of tokens."""
        prompt = self._random.integers(4, _VOCABULARY, prompt_tokens).tolist()
        request = self._client.generate(
            token_ids=prompt,
            outputs=[variant],
            stages={variant: {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0}},
        )
        return [time.monotonic(), *[time.monotonic() async for event in request if isinstance(event, Tokens)]]


async def _after(delay_s: float, request: Coroutine[object, object, None]) -> None:
    await asyncio.sleep(delay_s)
    await request


async def measure(model: Path) -> dict[str, list[Trial]]:
    """Starts the pipeline and measures both stages in turn. Returns the trials of each stage."""
    file = model.parent / "comparison.yaml"
    file.write_text(_PIPELINE.format(model=model))
    trials: dict[str, list[Trial]] = {SPLIT: [], WHOLE: []}
    async with AsyncExitStack() as stack:
        launcher = Launcher(load_pipeline(str(file)), listen="127.0.0.1:0", overrides={})
        await stack.enter_async_context(launcher.running())
        await launcher.wait_ready()
        client = await stack.enter_async_context(AsyncClient(launcher.endpoint))
        comparison = Comparison(client)
        await comparison.measure_interval()
        for number in range(REPEATS + 1):
            for variant, done in trials.items():
                done.append(await comparison.run(variant))
                _console.print(f"trial {number} of {REPEATS}, {variant}: {_summary(done[-1])}")
    return {variant: done[1:] for variant, done in trials.items()}


_TIMES: Mapping[str, Callable[[Trial], list[float]]] = {
    "first token of short requests": lambda trial: trial.first_s,
    "between tokens of short requests": lambda trial: trial.gaps_s,
    "first token of long requests": lambda trial: trial.long_s,
}


def _summary(trial: Trial) -> str:
    return ", ".join(
        f"{name} p50 {np.percentile(times_of(trial), 50):.3f} p99 {np.percentile(times_of(trial), 99):.3f} s"
        for name, times_of in _TIMES.items()
    )


def figures(trials: Mapping[str, Sequence[Trial]]) -> list[Figure]:
    """Returns the percentiles of each stage as medians over the repeats, and the ratios within the repeats."""
    found: list[Figure] = []
    for name, times_of in _TIMES.items():
        for percent in (50, 99):
            values = {
                variant: [float(np.percentile(times_of(trial), percent)) for trial in done]
                for variant, done in trials.items()
            }
            subject = f"{name}, p{percent}"
            ratios = [ours / theirs for ours, theirs in zip(values[SPLIT], values[WHOLE], strict=True)]
            found.append(Figure("split / two whole replicas", statistics.median(ratios), "ratio", subject=subject))
            found += [
                Figure(variant, statistics.median(each), "s", subject=subject) for variant, each in values.items()
            ]
    return found


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(LARGER, dtype="float32", vocabulary=_VOCABULARY)
        model = write_model(Path(folder) / "model", shape, max_model_len=MAX_MODEL_LEN)
        report("split", figures(asyncio.run(measure(model))), json_file=arguments.json)


if __name__ == "__main__":
    main()
