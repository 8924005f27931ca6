"""The processes of a measured deployment: one orchestrator, and farms of replicas."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.process.config import dump_config
from stagemesh.orchestrator.config import OrchestratorConfig, Registration
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc, stage_pb2

_READY_S = 120.0

console = Console(stderr=True)


@dataclass(frozen=True)
class Deployment:
    """The addresses and the process of a running orchestrator."""

    endpoint: str
    admin_endpoint: str
    orchestrator: psutil.Process


@asynccontextmanager
async def started(*command: str) -> AsyncGenerator[psutil.Process]:
    """Runs a Python module with arguments as a process, and ends it with the block."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def reporting_process(*command: str) -> AsyncGenerator[Callable[[], Awaitable[bytes]]]:
    """Runs a Python module that prints a report when it is stopped.

    Yields a function that stops it and returns the report.
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE)

    async def stop() -> bytes:
        process.terminate()
        report, _ = await process.communicate()
        return report

    try:
        yield stop
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def deployed(
    folder: Path, pipeline: str, *, replicas: int, farms: int, stamped: bool = False, beat_s: float | None = None
) -> AsyncGenerator[Deployment]:
    """Runs an orchestrator, and stage services with fake engines in `farms` processes. Yields when all are ready."""
    ports = PortPicker()
    endpoint, admin_endpoint = f"127.0.0.1:{ports.pick()}", f"127.0.0.1:{ports.pick()}"
    file, config = folder / "pipeline.yaml", folder / "orchestrator.json"
    file.write_text(pipeline)
    settings = OrchestratorConfig(
        str(file), {}, endpoint, registration=Registration(), admin_listen=admin_endpoint, drain_s=0.0
    )
    config.write_bytes(dump_config(settings))
    async with AsyncExitStack() as stack:
        orchestrator = await stack.enter_async_context(started("stagemesh.orchestrator", "--config", str(config)))
        for farm in range(farms):
            # Integer division puts every replica into exactly one farm.
            first, behind = replicas * farm // farms, replicas * (farm + 1) // farms
            command = (
                "benchmarks.orchestrator_paths.stage_farm",
                "--orchestrator",
                admin_endpoint,
                "--pipeline",
                str(file),
            )
            options = ["--first", str(first), "--count", str(behind - first)]
            options += ["--stamped"] if stamped else []
            options += ["--beat-s", str(beat_s)] if beat_s is not None else []
            await stack.enter_async_context(started(*command, *options))
        await _until_ready(endpoint, replicas)
        yield Deployment(endpoint, admin_endpoint, orchestrator)


async def until_listening(endpoint: str) -> None:
    """Returns when a service listens at the address."""
    async with open_channel(endpoint) as channel, asyncio.timeout(_READY_S):
        await channel.channel_ready()


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
            console.print(f"{ready} of {replicas} replicas are ready")


async def replicas_of(deployment: Deployment) -> list[orchestrator_pb2.ReplicaStatus]:
    """Returns the replicas of a deployment."""
    async with open_channel(deployment.admin_endpoint) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        answer = await stub.ListReplicas(admin_pb2.ListReplicasRequest(page_size=1000))
    return list(answer.replicas)


def cpu_s(process: psutil.Process) -> float:
    """Returns the processor time of a process so far."""
    times = process.cpu_times()
    return times.user + times.system
