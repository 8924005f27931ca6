"""Orchestrators over stages with the fake engine. Each replica is a process, with real gRPC."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from stagemesh.client import AsyncClient
from stagemesh.common.process_config import dump_config
from stagemesh.common.stage_config import StageConfig
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.launcher.ports import HOST, PortPicker
from stagemesh.orchestrator.launcher.process_configs import stage_config
from stagemesh.orchestrator.service import serving
from stagemesh.orchestrator.spec import load_pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import admin_pb2, admin_pb2_grpc
from tests.orchestrator.mesh import until_health


@dataclass(frozen=True)
class Orchestrator:
    """A running orchestrator, and the clients of its ports."""

    client: AsyncClient
    admin: grpc.aio.Channel
    metrics_endpoint: str

    async def stage(self, name: str) -> admin_pb2.StageStatus:
        """Returns the current status of a stage."""
        service = admin_pb2_grpc.AdminServiceStub(self.admin)
        answer = await service.ListStages(admin_pb2.ListStagesRequest(), timeout=10)
        return next(stage for stage in answer.stages if stage.name == name)

    async def until_stage(
        self, name: str, condition: Callable[[admin_pb2.StageStatus], bool], *, timeout_s: float = 20
    ) -> admin_pb2.StageStatus:
        """Waits until the status of a stage fulfils a condition, and returns the status."""
        status = await self.stage(name)
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(status):
                    await asyncio.sleep(0.05)
                    status = await self.stage(name)
        except TimeoutError as exc:
            raise AssertionError(f"the condition does not hold after {timeout_s} s: {status}") from exc
        return status

    @asynccontextmanager
    async def requests(self, count: int) -> AsyncGenerator[None]:
        """Runs requests within the block, and cancels those that have not ended at its end."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.client.generate("hello").result()) for _ in range(count)]
            yield
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def running_pipeline(
    folder: Path, text: str, *, replicas: Mapping[str, int] | None = None, orchestrators: int = 1
) -> AsyncGenerator[list[Orchestrator]]:
    """Runs the pipeline file `text`. `replicas` is the number of replicas of a stage, by default 1."""
    path = folder / "pipeline.yaml"
    path.write_text(text)
    pipeline, ports = load_pipeline(str(path)), PortPicker()
    async with AsyncExitStack() as stack:
        addresses = dict[str, tuple[ReplicaAddress, ...]]()
        for stage in pipeline.stages.values():
            for number in range((replicas or {}).get(stage.name, 1)):
                address = ReplicaAddress(f"{stage.name}-{number}", f"{HOST}:{ports.pick()}")
                addresses[stage.name] = (*addresses.get(stage.name, ()), address)
                config = stage_config(pipeline, stage, replica=address.name, listen=address.endpoint)
                await stack.enter_async_context(_process(config))
        started: list[Orchestrator] = []
        for _ in range(orchestrators):
            listen, admin, metrics = (f"{HOST}:{ports.pick()}" for _ in range(3))
            own = OrchestratorConfig(str(path), addresses, listen, admin_listen=admin, metrics_listen=metrics)
            await stack.enter_async_context(serving(own, pipeline))
            await until_health(await stack.enter_async_context(open_channel(listen)), serving=True, timeout_s=30)
            admin_channel = await stack.enter_async_context(open_channel(admin))
            client = await stack.enter_async_context(AsyncClient(listen))
            started.append(Orchestrator(client, admin_channel, metrics))
        yield started


@asynccontextmanager
async def _process(config: StageConfig) -> AsyncGenerator[None]:
    """Runs a replica as a process until the end of the block."""
    command = (sys.executable, "-m", "stagemesh.services.stage", "--config", "-")
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(dump_config(config))
    process.stdin.close()
    try:
        yield
    finally:
        process.kill()
        await process.wait()
