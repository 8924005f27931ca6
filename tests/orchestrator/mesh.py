"""An orchestrator over scripted stages, with real gRPC in one process."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import grpc

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.service import serving
from stagemesh.pipeline import Pipeline, load_pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, control_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc, stage_pb2
from tests.orchestrator.scripted_stage import Probed, Script, ScriptedStage, say_hello
from tests.rpc.call_errors import error_of
from tests.rpc.health_calls import Request as HealthRequest
from tests.rpc.health_calls import Response as HealthResponse
from tests.rpc.health_calls import watch
from tests.system.pipelines import pipeline_file

_T = TypeVar("_T")

CHAIN = """
pipeline: chain
stages:
  a: {engine: fake, function: source}
  b: {engine: fake, function: relay}
  c: {engine: fake, function: relay}
edges: [{from: a, to: b}, {from: b, to: c}]
outputs: {first: a, last: c}
"""

DIAMOND = """
pipeline: diamond
stages:
  join: {engine: fake, function: relay, join: any}
  left: {engine: fake, function: relay}
  right: {engine: fake, function: relay}
  top: {engine: fake, function: source}
edges:
  - {from: top, to: left}
  - {from: top, to: right, connector: grpc}
  - {from: left, to: join, chunk: whole}
  - {from: right, to: join, chunk: {frames: 5, initial_frames: 2}}
outputs: {start: top, side: left, end: join}
"""


@dataclass
class Mesh:
    """A running orchestrator, its client stub, and the replicas of its stages."""

    pipeline: Pipeline
    stub: "orchestrator_pb2_grpc.OrchestratorServiceAsyncStub"
    channel: grpc.aio.Channel
    stop: Callable[[], Awaitable[None]]
    """Stops the orchestrator."""
    stages: dict[str, ScriptedStage] = field(default_factory=dict[str, ScriptedStage])
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    admin: grpc.aio.Channel = field(kw_only=True)
    """A channel to the admin port."""
    admin_endpoint: str = field(kw_only=True)

    async def generate(self, **fields: Any) -> list[orchestrator_pb2.GenerateResponse]:
        """Runs a request and returns its events."""
        return [event async for event in self.stub.Generate(ask(**fields), timeout=20)]

    async def failure(self, **fields: Any) -> StagemeshError:
        """Runs a request and returns the error with which it ends."""
        return await error_of(self.stub.Generate(ask(**fields), timeout=20))

    async def cancel(self, request_id: str, *, when_left: bool = False) -> None:
        """Calls CancelRequest."""
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id, when_left=when_left)
        await self.stub.CancelRequest(request, timeout=10)

    async def describe(self) -> orchestrator_pb2.DescribePipelineResponse:
        """Calls DescribePipeline."""
        return await self.stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest(), timeout=10)

    async def list_replicas(self, **fields: Any) -> Sequence[orchestrator_pb2.ReplicaStatus]:
        """Calls ListReplicas."""
        request = admin_pb2.ListReplicasRequest(**fields)
        return (await admin_pb2_grpc.AdminServiceStub(self.admin).ListReplicas(request, timeout=10)).replicas

    def run(self, script: Script) -> None:
        """Makes all stages run this script for later steps."""
        for stage in self.stages.values():
            stage.script = script

    async def until_started(self) -> None:
        """Waits until each stage has sent an event of a step."""
        await asyncio.gather(*(stage.started.wait() for stage in self.stages.values()))

    async def until_idle(self, *, within_s: float = 5) -> None:
        """Waits until no stage runs a step."""
        async with asyncio.timeout(within_s):
            for stage in self.stages.values():
                while stage.running:
                    await stage.idle.wait()

    async def cancels(self, *, at_least: int) -> list[int]:
        """Waits until each stage has received this number of calls of CancelStep. Returns the numbers, by stage."""
        async with asyncio.timeout(5):
            while any(len(stage.cancels) < at_least for stage in self.stages.values()):
                await asyncio.sleep(0.005)
        return [len(stage.cancels) for stage in self.stages.values()]


def ask(**fields: Any) -> orchestrator_pb2.GenerateRequest:
    """Returns a request with a prompt."""
    return orchestrator_pb2.GenerateRequest(**{"input": {"text": "hello"}, **fields})


def texts(events: list[orchestrator_pb2.GenerateResponse], name: str) -> str:
    """Returns the whole text of one output."""
    return "".join(event.output.text for event in events if event.output.name == name)


def load(folder: Path, text: str = CHAIN) -> Pipeline:
    """Writes a pipeline file, and returns its pipeline."""
    return load_pipeline(str(pipeline_file(folder, text)))


@asynccontextmanager
async def mesh(
    folder: Path,
    text: str = CHAIN,
    *,
    scripts: Mapping[str, Script] | None = None,
    probed: Mapping[str, list[Probed]] | None = None,
    ready: bool = True,
    max_request_s: float = 60.0,
    drain_s: float = 0.1,
    replicas: int = 1,
    minimal: Collection[str] = (),
) -> AsyncGenerator[Mesh]:
    """Serves the pipeline file `text` over scripted stages. The stages in `minimal` serve the minimum profile only.

    Each stage has `replicas` replicas. `Mesh.stages` contains the first one by the stage's name, and the others by
    their own names.
    """
    pipeline = load(folder, text)
    async with AsyncExitStack() as stack:
        stages: dict[str, ScriptedStage] = {}
        servers: dict[str, Server] = {}
        peers: dict[str, ScriptedStage] = {}
        addresses: dict[str, tuple[ReplicaAddress, ...]] = {}
        for name, number in product(pipeline.stages, range(replicas)):
            replica = f"{name}-{number}"
            key = replica if number else name
            stage = stages[key] = ScriptedStage(name, script=(scripts or {}).get(name, say_hello))
            stage.probed = (probed or {}).get(name, stage.probed)
            stage.description.pipeline = pipeline.name
            stage.description.generation = pipeline.generation
            servers[key], endpoint = await serve(stage, minimal=name in minimal)
            stack.push_async_callback(servers[key].stop, grace_s=0)
            addresses[name] = (*addresses.get(name, ()), ReplicaAddress(replica, endpoint, f"{name}.example"))
            stage.peers = peers
            peers[replica] = stage
        admin_listen = f"127.0.0.1:{PortPicker().pick()}"
        config = OrchestratorConfig(
            str(folder / "pipeline.yaml"),
            addresses,
            "127.0.0.1:0",
            admin_listen=admin_listen,
            max_request_s=max_request_s,
            drain_s=drain_s,
        )
        service = await stack.enter_async_context(AsyncExitStack())
        port = await service.enter_async_context(serving(config, pipeline))
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
        if ready:
            await until_health(channel, serving=True)
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        admin = await stack.enter_async_context(open_channel(admin_listen))
        yield Mesh(pipeline, stub, channel, service.aclose, stages, servers, admin=admin, admin_endpoint=admin_listen)


async def until_health(channel: grpc.aio.Channel, *, serving: bool, service: str = "", timeout_s: float = 10) -> None:
    """Waits until the health of a process, or of one of its services, is as given."""
    wanted = HealthResponse.SERVING if serving else HealthResponse.NOT_SERVING
    async for answer in watch(channel)(HealthRequest(service=service), wait_for_ready=True, timeout=timeout_s):
        if answer.status == wanted:
            return
    raise AssertionError(f"the reports ended before the health of {service!r} was {wanted}")


async def poll(
    read: Callable[[], Awaitable[_T]],
    *,
    until: Callable[[_T], bool],
    timeout_s: float = 20,
    problem: str = "the condition does not hold",
) -> _T:
    """Reads a value until it fulfils a condition. Returns the value."""
    seen = await read()
    try:
        async with asyncio.timeout(timeout_s):
            while not until(seen):
                await asyncio.sleep(0.05)
                seen = await read()
    except TimeoutError as exc:
        raise AssertionError(f"{problem} after {timeout_s} s: {seen}") from exc
    return seen


async def serve(stage: ScriptedStage, *, minimal: bool = False) -> tuple[Server, str]:
    """Starts a server for the stage and returns it with its endpoint.

    `minimal` is whether the server serves only the RPCs that the orchestrator cannot do without.
    """
    server = Server("127.0.0.1:0")
    if minimal:
        server.grpc.add_generic_rpc_handlers((_minimum_profile(stage),))
    else:
        add_stage_service(stage, server.grpc)
        control_pb2_grpc.add_StageControlServiceServicer_to_server(stage.controls, server.grpc)
    server.set_health("", serving=True)
    return server, f"127.0.0.1:{await server.start()}"


def _minimum_profile(stage: ScriptedStage) -> grpc.GenericRpcHandler:
    methods: dict[str, Any] = {
        "ExecuteStep": grpc.unary_stream_rpc_method_handler(
            stage.ExecuteStep, stage_pb2.ExecuteStepRequest.FromString, stage_pb2.ExecuteStepResponse.SerializeToString
        ),
        "Describe": grpc.unary_unary_rpc_method_handler(
            stage.Describe, stage_pb2.DescribeRequest.FromString, stage_pb2.DescribeResponse.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler("stagemesh.v1.StageService", methods)
