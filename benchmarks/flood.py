"""Measures what a flood from one caller does to another one, and to the memory and the event loop of a process.

    python -m benchmarks.flood --json out/flood.json

A pipeline of fake stages runs with a gateway, a job server and a media service. A quiet caller sends requests to the
attacked process, four at a time, before and during each attack: it generates, over gRPC or HTTP, asks for a job, or
stores and fetches a file. An attack runs in its own process on this host, as fast as it can. All attacks aim at the
same processes, which shows memory that one of them leaves behind. Another process asks the attacked one for its health:
a blocked event loop does not answer.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import httpx

from benchmarks.flood_attacks.__main__ import ATTACKS
from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient
from stagemesh.pipeline import load_pipeline

_PIPELINE = """\
pipeline: flooded
stages:
  source: {{engine: fake, function: source, options: {{steps: 20, step_s: 0.005, size_bytes: 256}}}}
  relay: {{engine: fake, function: relay, options: {{size_bytes: 16384}}}}
  eye: {{engine: fake, function: look}}
edges: [{{from: source, to: relay, connector: shm}}]
outputs: {{text: relay, seen: eye}}
limits: {{max_in_flight: 16}}
media: {{store: {folder}/store}}
"""
_AT_ONCE = 4
_PAUSE_S = 0.01
_SAMPLE_S = 0.05
_MB = 1 << 20
_FILE_BYTES = 64 << 10
_CHAT = {"model": "flooded", "messages": [{"role": "user", "content": "hello"}]}
Ask: TypeAlias = Callable[[], Awaitable[object]]
"""Sends one request of the quiet caller, and waits for its answer."""


class Process(NamedTuple):
    """A process that is attacked, and what the quiet caller asks of it."""

    pid: int
    endpoint: str
    """"host:port"."""
    ask: Ask
    is_http: bool = False


class Quiet(NamedTuple):
    """The times of the quiet caller's requests in seconds, and the number of those that failed."""

    times_s: Sequence[float]
    failed: int

    @property
    def p99_s(self) -> float:
        """The 99th percentile of the times."""
        return statistics.quantiles(self.times_s, n=100)[98]


class Outcome(NamedTuple):
    """The effect of an attack on the quiet caller and on the attacked process."""

    quiet: Quiet
    most_memory: int
    """In bytes."""
    blocked_s: float
    """The longest time for which the process did not answer a health check."""
    attempts_a_second: float


async def measure(ask: Ask, seconds: float) -> Quiet:
    """Sends requests for this time, four at once."""
    times_s: list[float] = []
    failed = 0
    until_s = time.monotonic() + seconds

    async def work() -> None:
        nonlocal failed
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            try:
                await ask()
            except Exception as exc:  # noqa: BLE001  # every failure counts
                print(f"a request of the quiet caller failed: {exc!r}", file=sys.stderr)
                failed += 1
            times_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return Quiet(times_s, failed)


async def measure_under(attack: str, process: Process, seconds: float) -> Outcome:
    """Sends the requests of the quiet caller during an attack."""
    most = 0

    async def sample() -> None:
        nonlocal most
        while True:
            most = max(most, memory_of(process.pid))
            await asyncio.sleep(_SAMPLE_S)

    sampling = asyncio.create_task(sample())
    # The health checks have a connection before the attack takes all that the process permits.
    async with asking_for_health(process) as blocked_s, attacking(attack, process.endpoint) as counts:
        before = len(counts)
        quiet = await measure(process.ask, seconds)
    sampling.cancel()
    attempts = counts[-1] - counts[max(0, before - 1)] if counts else 0
    return Outcome(quiet, most, blocked_s[0], attempts / seconds)


@asynccontextmanager
async def asking_for_health(process: Process) -> AsyncGenerator[Sequence[float]]:
    """Asks a process for its health within the block. The yielded list then has the longest time to an answer."""
    url = f"http://{process.endpoint}" if process.is_http else process.endpoint
    command = [sys.executable, "-m", "benchmarks.flood_attacks.health", url, str(process.pid)]
    pipe = asyncio.subprocess.PIPE
    probe = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert probe.stdout is not None, "its output is a pipe"
    await probe.stdout.readline()
    longest_s: list[float] = []
    try:
        yield longest_s
    finally:
        output, _ = await probe.communicate(b"")
        # A process that cannot be asked at all does not answer.
        longest_s.append(float(output or "inf"))


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


def memory_of(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def figures(attack: str, calm: Quiet, outcome: Outcome, before: int) -> list[Figure]:
    """Returns the measurements of an attack. `before` is the process's memory before the first attack on it."""
    return [
        Figure("p99 of the other caller, during / before", outcome.quiet.p99_s / calm.p99_s, "ratio", "<=3", attack),
        Figure("longest request of the other caller", max(outcome.quiet.times_s), "s", "", attack),
        Figure("failed requests of the other caller", outcome.quiet.failed, "", "<=0", attack),
        Figure("memory of the process, most", (outcome.most_memory - before) / _MB, "MB", "<=1024", attack),
        Figure("event loop of the process, blocked at most", 1e3 * outcome.blocked_s, "ms", "<=50", attack),
        Figure("attempts a second", outcome.attempts_a_second, "1/s", "", attack),
    ]


@asynccontextmanager
async def running() -> AsyncGenerator[Mapping[str, Process]]:
    """Runs the pipeline. Yields the processes by the targets of attacks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The processes keep their logs, jobs and voices there.
        os.environ["STAGEMESH_HOME"] = str(folder / "home")
        (folder / "store").mkdir()
        (folder / "flooded.yaml").write_text(_PIPELINE.format(folder=folder))
        (folder / "sent.png").write_bytes(bytes(_FILE_BYTES))
        pipeline = load_pipeline(str(folder / "flooded.yaml"))
        launcher = Launcher(pipeline, listen="127.0.0.1:0", gateway_listen="127.0.0.1:0", jobs=True)
        async with launcher.running():
            await launcher.wait_ready()
            async with AsyncClient(launcher.endpoint) as client, httpx.AsyncClient(timeout=60) as web:
                job = await client.jobs.submit("hello", caller="quiet", outputs=["text"])
                copies = itertools.count()

                async def generate() -> None:
                    await client.generate("hello", caller="quiet", outputs=["text"]).result()

                async def chat() -> None:
                    url = f"http://{launcher.gateway_endpoint}/v1/chat/completions"
                    (await web.post(url, json=_CHAT)).raise_for_status()

                async def store() -> None:
                    copy = folder / f"copy-{next(copies)}"
                    await client.download(await client.upload(folder / "sent.png"), copy)
                    copy.unlink()

                async def ask_for_job() -> None:
                    await client.jobs.get(job.job_id, caller="quiet")

                def process(name: str, ask: Ask, *, is_http: bool = False) -> Process:
                    status = launcher.processes[name]
                    assert status.process_id is not None, "it runs"
                    return Process(status.process_id, status.endpoint, ask, is_http)

                yield {
                    "orchestrator": process("orchestrator", generate),
                    "stage": process("relay-0", generate),
                    "gateway": process("gateway", chat, is_http=True),
                    "jobs": process("jobs", ask_for_job),
                    "media": process("media", store),
                }


async def _run(attacks: Sequence[str], seconds: float) -> list[Figure]:
    found: list[Figure] = []
    async with running() as processes:
        for process in processes.values():
            await measure(process.ask, 1)
        before = {name: memory_of(process.pid) for name, process in processes.items()}
        for attack in attacks:
            target = ATTACKS[attack].target
            calm = await measure(processes[target].ask, seconds / 3)
            outcome = await measure_under(attack, processes[target], seconds)
            found += figures(attack, calm, outcome, before[target])
            print(
                f"{attack}: p99 {calm.p99_s:.3f} s before, {outcome.quiet.p99_s:.3f} s during it; "
                f"blocked {outcome.blocked_s:.3f} s; {(outcome.most_memory - before[target]) / _MB:.0f} MB",
                file=sys.stderr,
            )
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--seconds", type=float, default=12, help="Duration of each attack in seconds. Default 12.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="Default: all.")
    arguments = parser.parse_args()
    report("flood", asyncio.run(_run(arguments.attacks, arguments.seconds)), json_file=arguments.json)


if __name__ == "__main__":
    main()
