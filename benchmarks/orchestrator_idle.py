"""What an idle orchestrator costs: its CPU time with many replicas that are ready and have nothing to do.

    python -m benchmarks.orchestrator_idle --json out/orchestrator-idle.json

The orchestrator is the real service in a process of its own; replicas are real stage services with fake engines, a few
dozen to a process, that register with it.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.report import Figure, report
from stagemesh.connectors.channels import open_channel
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, dump_orchestrator_config
from stagemesh.orchestrator.launcher.ports import PortPicker
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc, stage_pb2

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
_READY_S = 120.0
_SETTLE_S = 10.0
_MIB = 1 << 20

_console = Console(stderr=True)


@asynccontextmanager
async def _process(*command: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_ready(endpoint: str, replicas: int) -> None:
    async with open_channel(endpoint) as channel, asyncio.timeout(_READY_S):
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        ready = -1
        while ready < replicas:
            await asyncio.sleep(1)
            request = orchestrator_pb2.DescribePipelineRequest()
            described = await stub.DescribePipeline(request, wait_for_ready=True, timeout=_READY_S)
            states = [replica.state for stage in described.stages for replica in stage.replicas]
            ready = states.count(stage_pb2.REPLICA_STATE_READY)
            _console.print(f"{ready} of {replicas} replicas are ready")


async def measure(*, replicas: int, window_s: float, windows: int) -> tuple[list[float], float]:
    """Per cent of a core in each window, and the orchestrator's memory in bytes."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = f"127.0.0.1:{PortPicker().pick()}"
        pipeline, config = folder / "idle.yaml", folder / "orchestrator.json"
        pipeline.write_text(_PIPELINE)
        settings = OrchestratorConfig(str(pipeline), {}, endpoint, registration=Registration())
        config.write_bytes(dump_orchestrator_config(settings))
        orchestrator = await stack.enter_async_context(_process("stagemesh.orchestrator", "--config", str(config)))
        for first in range(0, replicas, _IN_A_PROCESS):
            count = min(_IN_A_PROCESS, replicas - first)
            farm = ("--pipeline", str(pipeline), "--first", str(first), "--count", str(count))
            command = ("benchmarks.orchestrator_ways.stage_farm", "--orchestrator", endpoint, *farm)
            await stack.enter_async_context(_process(*command))
        await _until_ready(endpoint, replicas)
        await asyncio.sleep(_SETTLE_S)
        watched = psutil.Process(orchestrator.pid)
        shares = [await _cpu_percent(watched, window_s) for _ in range(windows)]
        return shares, float(watched.memory_info().rss)


async def _cpu_percent(process: psutil.Process, window_s: float) -> float:
    loop = asyncio.get_running_loop()
    before, began_s = process.cpu_times(), loop.time()
    await asyncio.sleep(window_s)
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / (loop.time() - began_s)


def main() -> None:
    """Reads the command line, measures, reports."""
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
