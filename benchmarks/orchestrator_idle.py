"""Measures an idle orchestrator: its processor time with many replicas that are ready and idle.

    python -m benchmarks.orchestrator_idle --json out/orchestrator-idle.json

The orchestrator is the real service in a separate process. The replicas are real stage services with fake engines, a
few dozen in each process, and register with it.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from benchmarks.orchestrator_ways.processes import cpu_s, deployed
from benchmarks.report import Figure, report

_PIPELINE = """
pipeline: idle
stages:
  thinker: {engine: fake, function: source}
  talker: {engine: fake, function: relay}
  vocoder: {engine: fake, function: relay}
edges: [{from: thinker, to: talker}, {from: talker, to: vocoder}]
outputs: {text: vocoder}
"""
_IN_A_PROCESS = 25
_SETTLE_S = 10.0
_MIB = 1 << 20


async def measure(*, replicas: int, window_s: float, windows: int) -> tuple[list[float], float]:
    """Measures per cent of a core in each window, and the orchestrator's memory in bytes."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        farms = math.ceil(replicas / _IN_A_PROCESS)
        deployment = await stack.enter_async_context(deployed(folder, _PIPELINE, replicas=replicas, farms=farms))
        await asyncio.sleep(_SETTLE_S)
        watched = deployment.orchestrator
        shares = [await _cpu_percent(watched, window_s) for _ in range(windows)]
        return shares, float(watched.memory_info().rss)


async def _cpu_percent(process: psutil.Process, window_s: float) -> float:
    loop = asyncio.get_running_loop()
    before_s, began_s = cpu_s(process), loop.time()
    await asyncio.sleep(window_s)
    return 100 * (cpu_s(process) - before_s) / (loop.time() - began_s)


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--windows", type=int, default=5)
    arguments = parser.parse_args()
    measuring = measure(replicas=arguments.replicas, window_s=arguments.window_s, windows=arguments.windows)
    shares, size_bytes = asyncio.run(measuring)
    subject = f"{arguments.replicas} idle replicas"
    figures = [
        Figure("orchestrator CPU, median", statistics.median(shares), "% of a core", "<=2", subject),
        Figure("orchestrator CPU, most", max(shares), "% of a core", "", subject),
        Figure("orchestrator memory", size_bytes / _MIB, "MiB", "", subject),
    ]
    report("orchestrator_idle", figures, json_file=arguments.json)


if __name__ == "__main__":
    main()
