"""Orchestrators over stages with the fake engine, with real gRPC.

The replicas run in the test's own process, except the ones that a test stops or kills by a signal.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from stagemesh.cli.launcher.ports import HOST, PortPicker
from stagemesh.cli.launcher.process_configs import stage_config
from stagemesh.client import AsyncClient
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.service import serving
from stagemesh.pipeline import load_pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.stage.control_servicer import StageControlServicer
from stagemesh.services.stage.servicer import StageServicer
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, control_pb2_grpc, stage_pb2
from tests.children import running_process
from tests.orchestrator.mesh import poll, until_health
from tests.stage.replicas import make_runtime
from tests.system.pipelines import pipeline_file


@dataclass(frozen=True)
class Orchestrator:
    """A running orchestrator, and the clients of its ports."""

    client: AsyncClient
    admin: grpc.aio.Channel
    metrics_endpoint: str
    replicas: Mapping[str, asyncio.subprocess.Process]
    """The replicas that are processes, by name."""
    endpoints: Mapping[str, str]
    """The addresses of the replicas by name."""

    async def stage(self, name: str) -> admin_pb2.StageStatus:
        """Returns the current status of a stage."""
        service = admin_pb2_grpc.AdminServiceStub(self.admin)
        answer = await service.ListStages(admin_pb2.ListStagesRequest(), timeout=10)
        return next(stage for stage in answer.stages if stage.name == name)

    async def states(self) -> dict[str, str]:
        """Returns the current state of each replica, by its name."""
        service = admin_pb2_grpc.AdminServiceStub(self.admin)
        answer = await service.ListReplicas(admin_pb2.ListReplicasRequest(), timeout=10)
        names = stage_pb2.ReplicaState.Name
        return {each.name: names(each.state).removeprefix("REPLICA_STATE_") for each in answer.replicas}

    async def until_states(self, timeout_s: float = 60, **states: str) -> None:
        """Waits until replicas are in these states. Underscores in their names stand for hyphens."""
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        problem = f"the states are not {wanted}"
        await poll(self.states, until=lambda seen: wanted.items() <= seen.items(), timeout_s=timeout_s, problem=problem)

    async def until_stage(
        self, name: str, condition: Callable[[admin_pb2.StageStatus], bool], *, timeout_s: float = 60
    ) -> admin_pb2.StageStatus:
        """Waits until the status of a stage fulfils a condition, and returns the status."""
        return await poll(lambda: self.stage(name), until=condition, timeout_s=timeout_s)

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
    folder: Path,
    text: str,
    *,
    replicas: Mapping[str, int] | None = None,
    sleepers: Mapping[str, int] | None = None,
    sleep_when_idle_s: float = 60.0,
    warm: Mapping[str, float] | None = None,
    orchestrators: int = 1,
    processes: Collection[str] = (),
) -> AsyncGenerator[list[Orchestrator]]:
    """Runs the pipeline file `text`.

    - `replicas` is the number of replicas of a stage, by default 1.
    - `sleepers` is the number of replicas of a stage that sleep when they are idle. They are the last ones.
    - `processes` are the names of the replicas that are processes.
    """
    path = pipeline_file(folder, text)
    pipeline, ports = load_pipeline(str(path)), PortPicker()
    async with AsyncExitStack() as stack:
        addresses = dict[str, tuple[ReplicaAddress, ...]]()
        started_processes = dict[str, asyncio.subprocess.Process]()
        for stage in pipeline.stages.values():
            count = (replicas or {}).get(stage.name, 1)
            for number in range(count):
                address = ReplicaAddress(f"{stage.name}-{number}", f"{HOST}:{ports.pick()}")
                addresses[stage.name] = (*addresses.get(stage.name, ()), address)
                config = stage_config(pipeline, stage, replica=address.name, listen=address.endpoint)
                if number >= count - (sleepers or {}).get(stage.name, 0):
                    config = replace(config, sleep_when_idle_s=sleep_when_idle_s)
                if address.name in processes:
                    started_processes[address.name] = await stack.enter_async_context(_process(config))
                else:
                    await stack.enter_async_context(_serving_runtime(config))
        endpoints = {address.name: address.endpoint for each in addresses.values() for address in each}
        started: list[Orchestrator] = []
        for _ in range(orchestrators):
            listen, admin, metrics = (f"{HOST}:{ports.pick()}" for _ in range(3))
            own = OrchestratorConfig(
                str(path), addresses, listen, admin_listen=admin, metrics_listen=metrics, warm=warm or {}
            )
            await stack.enter_async_context(serving(own, pipeline))
            await until_health(await stack.enter_async_context(open_channel(listen)), serving=True, timeout_s=120)
            admin_channel = await stack.enter_async_context(open_channel(admin))
            client = await stack.enter_async_context(AsyncClient(listen))
            started.append(Orchestrator(client, admin_channel, metrics, started_processes, endpoints))
        yield started


@asynccontextmanager
async def _serving_runtime(config: StageConfig) -> AsyncGenerator[None]:
    """Serves a replica in this process until the end of the block."""
    runtime, server = make_runtime(config), Server(config.listen)
    add_stage_service(StageServicer(runtime), server.grpc)
    control_pb2_grpc.add_StageControlServiceServicer_to_server(StageControlServicer(runtime), server.grpc)
    await server.start()
    try:
        await runtime.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(runtime.watch_engine())
            yield
            watching.cancel()
    finally:
        await runtime.close()
        await server.stop(grace_s=0)


@asynccontextmanager
async def _process(config: StageConfig) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Runs a replica as a process until the end of the block."""
    command = (sys.executable, "-m", "stagemesh.services.stage", "--config", "-")
    async with running_process(*command, stdin=asyncio.subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(dump_config(config))
        process.stdin.close()
        yield process
