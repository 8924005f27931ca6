"""Measures what a flood from one caller does to another one: the time of its requests, and the orchestrator's memory.

    python -m benchmarks.flood --json out/flood.json

A pipeline of fake stages answers the requests of a quiet caller, four at a time, before and during each attack. An
attack runs in a process of its own on this host, as fast as it can. All attacks aim at one orchestrator, so that
memory that one of them leaves behind is seen.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.flood_attacks.__main__ import ATTACKS
from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient
from stagemesh.pipeline import load_pipeline

_PIPELINE = """\
pipeline: flooded
stages:
  source: {engine: fake, function: source, options: {steps: 20, step_s: 0.01, size_bytes: 256}}
  relay: {engine: fake, function: relay, options: {size_bytes: 16384}}
edges: [{from: source, to: relay, connector: shm}]
outputs: {text: relay}
limits: {max_in_flight: 16}
"""
_AT_ONCE = 4
_SAMPLE_S = 0.05
_MB = 1 << 20


class Quiet(NamedTuple):
    """The times of the quiet caller's requests in seconds, and the number of those that failed."""

    times_s: Sequence[float]
    failed: int

    @property
    def p99_s(self) -> float:
        """The 99th percentile of the times."""
        return statistics.quantiles(self.times_s, n=100)[98]


class Outcome(NamedTuple):
    """The effect of an attack on the quiet caller and on the memory of the orchestrator, in bytes."""

    quiet: Quiet
    most_memory: int
    attempts_a_second: float


async def measure(client: AsyncClient, requests: int) -> Quiet:
    """Runs this number of requests, four at a time."""
    times_s: list[float] = []
    failed = 0
    left = iter(range(requests))

    async def work() -> None:
        nonlocal failed
        for _ in left:
            began_s = time.perf_counter()
            try:
                await client.generate("hello", caller="quiet").result()
            except Exception as exc:  # noqa: BLE001  # every failure counts
                print(f"a request of the quiet caller failed: {exc!r}", file=sys.stderr)
                failed += 1
            times_s.append(time.perf_counter() - began_s)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return Quiet(times_s, failed)


async def measure_under(attack: str, launcher: Launcher, client: AsyncClient, requests: int) -> Outcome:
    """Runs the requests of the quiet caller during an attack."""
    most = 0

    async def sample() -> None:
        nonlocal most
        while True:
            most = max(most, memory_of(launcher))
            await asyncio.sleep(_SAMPLE_S)

    sampling = asyncio.create_task(sample())
    async with attacking(attack, launcher.endpoint) as counts:
        began_s, before = time.monotonic(), len(counts)
        quiet = await measure(client, requests)
        seconds = time.monotonic() - began_s
    sampling.cancel()
    attempts = counts[-1] - counts[max(0, before - 1)] if counts else 0
    return Outcome(quiet, most, attempts / seconds)


@asynccontextmanager
async def attacking(attack: str, endpoint: str) -> AsyncGenerator[Sequence[int]]:
    """Attacks an endpoint within the block. Yields the numbers of attempts, one for each second."""
    command = [sys.executable, "-m", "benchmarks.flood_attacks", attack, endpoint]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None, "its output is a pipe"
    await process.stdout.readline()
    counts: list[int] = []

    async def count(lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            counts.append(int(line))

    counting = asyncio.create_task(count(process.stdout))
    try:
        yield counts
    finally:
        died = process.returncode is not None
        if not died:
            process.kill()
        await process.wait()
        await counting
    if died:
        raise RuntimeError(f"the attack {attack} ended by itself")


def memory_of(launcher: Launcher) -> int:
    """Returns the resident memory of the orchestrator in bytes."""
    pid = launcher.processes["orchestrator"].process_id
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def figures(attack: str, calm: Quiet, outcome: Outcome, before: int) -> list[Figure]:
    """Returns the figures of an attack. `before` is the orchestrator's memory before the first attack."""
    return [
        Figure("p99 of the other caller, during / before", outcome.quiet.p99_s / calm.p99_s, "ratio", "<=3", attack),
        Figure("longest request of the other caller", max(outcome.quiet.times_s), "s", "", attack),
        Figure("failed requests of the other caller", outcome.quiet.failed, "", "<=0", attack),
        Figure("memory of the orchestrator, most", (outcome.most_memory - before) / _MB, "MB", "<=1024", attack),
        Figure("attempts a second", outcome.attempts_a_second, "1/s", "", attack),
    ]


async def _run(attacks: Sequence[str], requests: int) -> list[Figure]:
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "flooded.yaml"
        path.write_text(_PIPELINE)
        launcher = Launcher(load_pipeline(str(path)), listen="127.0.0.1:0")
        async with launcher.running():
            await launcher.wait_ready()
            async with AsyncClient(launcher.endpoint) as client:
                await measure(client, requests // 10)
                before = memory_of(launcher)
                for attack in attacks:
                    calm = await measure(client, requests // 5)
                    outcome = await measure_under(attack, launcher, client, requests)
                    found += figures(attack, calm, outcome, before)
                    print(
                        f"{attack}: p99 {calm.p99_s:.3f} s before, {outcome.quiet.p99_s:.3f} s during it",
                        file=sys.stderr,
                    )
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--requests", type=int, default=600, help="Requests of the quiet caller. Default 600.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="Default: all.")
    arguments = parser.parse_args()
    report("flood", asyncio.run(_run(arguments.attacks, arguments.requests)), json_file=arguments.json)


if __name__ == "__main__":
    main()
