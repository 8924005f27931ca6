"""Measures what TLS with certificates for all processes costs: a pipeline of fake stages with it, and without.

    python -m benchmarks.overhead --json out/overhead.json

Both run in alternation, in processes of their own on this host. One kind of request has small outputs, so that its time
is that of the calls. The other moves large chunks over an edge with shared memory, which TLS does not concern.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Figure, report
from stagemesh.client import AsyncClient
from stagemesh.orchestrator.launcher import Launcher
from stagemesh.orchestrator.launcher.certificates import Authority
from stagemesh.orchestrator.spec import load_pipeline

_PIPELINE = """\
pipeline: overhead
stages:
  source: {{engine: fake, function: source, options: {{steps: {steps}, step_s: 0.0, size_bytes: {size_bytes}}}}}
  relay: {{engine: fake, function: relay, options: {{size_bytes: 64}}}}
edges: [{{from: source, to: relay, connector: shm}}]
outputs: {{text: relay}}
"""
_SMALL, _LARGE = {"steps": 8, "size_bytes": 256}, {"steps": 64, "size_bytes": 1 << 20}
_WARM_UP = 20


class Times(NamedTuple):
    """The median time of a request with small outputs, and of one with large chunks, in seconds."""

    small_s: float
    large_s: float


async def measure(folder: Path, *, tls: bool, small: int, large: int) -> Times:
    """Starts the pipelines and runs this number of requests of each kind, one after the other."""
    authority = Authority(folder / "authority") if tls else None
    medians: list[float] = []
    for name, options, count in (("small", _SMALL, small), ("large", _LARGE, large)):
        path = folder / f"{name}.yaml"
        path.write_text(_PIPELINE.format(**options))
        launcher = Launcher(load_pipeline(str(path)), listen="127.0.0.1:0", authority=authority)
        async with launcher.running():
            await launcher.wait_ready()
            async with AsyncClient(launcher.endpoint) as client:
                times_s = [await _time_request(client) for _ in range(_WARM_UP + count)]
        medians.append(statistics.median(times_s[_WARM_UP:]))
    return Times(*medians)


async def _time_request(client: AsyncClient) -> float:
    began_s = time.perf_counter()
    await client.generate("hello").result()
    return time.perf_counter() - began_s


def figures(plain: Sequence[Times], secure: Sequence[Times]) -> list[Figure]:
    """Returns the figures of paired measurements without and with TLS."""
    median, pairs = statistics.median, list(zip(plain, secure, strict=True))
    return [
        Figure(
            "request with small outputs, TLS / plaintext",
            median(b.small_s / a.small_s for a, b in pairs),
            "ratio",
            "<=1.15",
            "TLS",
        ),
        Figure(
            "request with large chunks over shm, TLS / plaintext",
            median(b.large_s / a.large_s for a, b in pairs),
            "ratio",
            "<=1.02",
            "TLS",
        ),
        Figure("request with small outputs, plaintext", 1000 * median(each.small_s for each in plain), "ms", "", "TLS"),
        Figure("request with large chunks, plaintext", 1000 * median(each.large_s for each in plain), "ms", "", "TLS"),
    ]


async def _run(repeats: int, small: int, large: int) -> list[Figure]:
    plain: list[Times] = []
    secure: list[Times] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(repeats):
            # The order alternates, so that a machine that becomes slower does not favor one of them.
            for tls in (False, True) if number % 2 == 0 else (True, False):
                (secure if tls else plain).append(await measure(Path(name), tls=tls, small=small, large=large))
    return figures(plain, secure)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--repeats", type=int, default=6, help="Number of alternations. Default 6.")
    parser.add_argument("--requests", type=int, default=200, help="Requests with small outputs. Default 200.")
    parser.add_argument("--large-requests", type=int, default=40, help="Requests with large chunks. Default 40.")
    arguments = parser.parse_args()
    found = asyncio.run(_run(arguments.repeats, arguments.requests, arguments.large_requests))
    report("overhead", found, json_file=arguments.json)


if __name__ == "__main__":
    main()
