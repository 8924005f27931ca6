"""A pipeline whose orchestrator and stages run in the process of the test, and call each other over real gRPC.

It starts in a fraction of a second, and `stagemesh up` in seconds. Tests of what processes do use tests/deployment.py.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from anyio.from_thread import start_blocking_portal

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.cli.launcher.process_configs import stage_config
from stagemesh.common.plugins.descriptors import EXTERNAL, EngineDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.service import serving
from stagemesh.pipeline import load_pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.stage.control_servicer import StageControlServicer
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.servicer import SERVICE_NAME, StageServicer
from stagemesh.v1 import control_pb2_grpc
from tests.deployment import Replicas
from tests.orchestrator.mesh import until_health


class LocalMesh(Replicas):
    """An orchestrator and the replicas of each stage, in this process."""

    def __init__(self, endpoint: str, admin_endpoint: str, stages: Mapping[str, "LocalReplica"]) -> None:
        self.endpoint, self.admin_endpoint, self.stages = endpoint, admin_endpoint, stages

    def replicas(self) -> list[str]:
        return list(self.stages)

    def endpoint_of(self, replica: str) -> str:
        return self.stages[replica].endpoint


class LocalReplica(NamedTuple):
    """A replica of a stage in this process."""

    runtime: StageRuntime
    endpoint: str


@contextmanager
def local_mesh(pipeline: str | Path, *, overrides: Mapping[str, str] | None = None) -> Iterator[LocalMesh]:
    """Runs a pipeline file in a thread of this process, and yields when every stage is ready.

    The replicas of external stages must run at the addresses in the file.
    """
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running_mesh(pipeline, overrides)) as up:
        yield up


@asynccontextmanager
async def running_mesh(pipeline: str | Path, overrides: Mapping[str, str] | None = None) -> AsyncGenerator[LocalMesh]:
    """Runs a pipeline file in the event loop of the caller, and yields when every stage is ready."""
    loaded = load_pipeline(str(pipeline), overrides=overrides)
    async with AsyncExitStack() as stack:
        stages = dict[str, LocalReplica]()
        addresses = dict[str, tuple[ReplicaAddress, ...]]()
        for stage in loaded.stages.values():
            if stage.engine == EXTERNAL:
                continue
            names = [f"{stage.name}-{number}" for number in range(stage.replicas)]
            for name in names:
                config = stage_config(loaded, stage, replica=name, listen="127.0.0.1:0")
                stages[name] = await stack.enter_async_context(_running_stage(config))
            addresses[stage.name] = tuple(ReplicaAddress(name, stages[name].endpoint) for name in names)
        admin = f"127.0.0.1:{PortPicker().pick()}"
        own = OrchestratorConfig(str(pipeline), addresses, "127.0.0.1:0", admin_listen=admin, drain_s=0.1)
        endpoint = f"127.0.0.1:{await stack.enter_async_context(serving(own, loaded))}"
        async with open_channel(endpoint) as channel:
            await until_health(channel, serving=True)
        yield LocalMesh(endpoint, admin, stages)


@asynccontextmanager
async def _running_stage(config: StageConfig) -> AsyncGenerator[LocalReplica]:
    """Runs a replica, and yields it when it is ready."""
    descriptor = load_descriptor(EngineDescriptor, config.engine)
    data_plane = DataPlane(
        replica=config.replica, pipeline=config.pipeline, generation=config.generation, **asdict(config.data_plane)
    )
    signature = descriptor.signature(config.function, config.options)
    runtime = StageRuntime(import_factory(descriptor.factory)(config), data_plane, config, signature)
    server = Server(config.listen)
    add_stage_service(StageServicer(runtime), server.grpc)
    control_pb2_grpc.add_StageControlServiceServicer_to_server(StageControlServicer(runtime), server.grpc)

    def show_readiness(serving: bool) -> None:
        for name in ("", SERVICE_NAME):
            server.set_health(name, serving=serving)

    runtime.lifecycle.on_serving = show_readiness
    try:
        await runtime.start()
        show_readiness(True)
        yield LocalReplica(runtime, f"127.0.0.1:{await server.start()}")
    finally:
        await runtime.close()
        await server.stop(grace_s=0)
