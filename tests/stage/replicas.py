"""Stage replicas for tests: runtimes alone, and runtimes behind a real gRPC server on a free port."""

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.common.plugins.descriptors import Signature
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.fake_engine import signature
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.engines.base import Engine, Task
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.servicer import StageServicer
from stagemesh.services.stage.step.spec import StepSpec, StreamedOutput
from stagemesh.v1 import chunk_pb2, request_pb2, stage_pb2, stage_pb2_grpc
from tests.rpc.call_errors import error_of

EDGE = "thinker->talker"
CONNECTORS = {"shm": chunk_pb2.CONNECTOR_SHM, "grpc": chunk_pb2.CONNECTOR_GRPC}


def stage_config(stage: str = "thinker", *, function: str = "source", **options: float) -> StageConfig:
    """Returns the config of a stage with the fake engine."""
    return StageConfig(
        pipeline="test",
        generation="1",
        stage=stage,
        replica=f"{stage}-0",
        engine="fake",
        listen="127.0.0.1:0",
        function=function,
        options=options,
        max_queued=4,
    )


def make_runtime(
    config: StageConfig | None = None, *, engine: Engine | None = None, emulated: Signature | None = None
) -> StageRuntime:
    """Returns a runtime that is LOADING. `emulated` is its signature, by default that of its function."""
    config = config or stage_config()
    data_plane = DataPlane(
        replica=config.replica, pipeline=config.pipeline, generation=config.generation, arena_bytes=1 << 20
    )
    return StageRuntime(engine or FakeEngine(config), data_plane, config, emulated or signature(config.function))


@asynccontextmanager
async def loading(config: StageConfig | None = None, **options: Any) -> AsyncGenerator[StageRuntime]:
    """Yields a LOADING runtime and closes it at the end. `options` are for `make_runtime`."""
    runtime = make_runtime(config, **options)
    try:
        yield runtime
    finally:
        await runtime.close()


@asynccontextmanager
async def ready_runtime(
    config: StageConfig | None = None, *, engine: Engine | None = None
) -> AsyncGenerator[StageRuntime]:
    """Yields a READY runtime and closes it at the end."""
    async with loading(config, engine=engine) as runtime:
        await runtime.start()
        yield runtime


@dataclass(frozen=True)
class Replica:
    """A runtime behind a gRPC server."""

    runtime: StageRuntime
    endpoint: str
    stub: "stage_pb2_grpc.StageServiceAsyncStub"
    server: Server


@asynccontextmanager
async def served(runtime: StageRuntime) -> AsyncGenerator[Replica]:
    """Serves a runtime."""
    server = Server("127.0.0.1:0")
    add_stage_service(StageServicer(runtime), server.grpc)
    endpoint = f"127.0.0.1:{await server.start()}"
    async with open_channel(endpoint) as channel:
        try:
            yield Replica(runtime, endpoint, stage_pb2_grpc.StageServiceStub(channel), server)
        finally:
            await server.stop(grace_s=0)


@asynccontextmanager
async def served_stage(config: StageConfig | None = None, *, engine: Engine | None = None) -> AsyncGenerator[Replica]:
    """Serves a READY runtime."""
    async with ready_runtime(config, engine=engine) as runtime, served(runtime) as replica:
        yield replica


Events: TypeAlias = AsyncGenerator[stage_pb2.ExecuteStepResponse]


@asynccontextmanager
async def running_step(
    config: StageConfig | None = None, *, engine: Engine | None = None, spec: StepSpec | None = None
) -> AsyncGenerator[tuple[StageRuntime, Events]]:
    """Yields a READY runtime, and the events of a step of which the first output has been read."""
    async with ready_runtime(config, engine=engine) as runtime, attached(runtime, spec) as events:
        yield runtime, events


@asynccontextmanager
async def attached(
    runtime: StageRuntime, spec: StepSpec | None = None, *, time_left_s: float | None = None
) -> AsyncGenerator[Events]:
    """Yields the events of a step after Accepted and the first output, after which the engine works."""
    async with aclosing(runtime.execute(spec or step_spec(), time_left_s=time_left_s)) as events:
        assert (await anext(events)).HasField("accepted")
        assert (await anext(events)).HasField("output")
        yield events


def step_spec(
    request_id: str = "r",
    *,
    attempt: int = 1,
    content: str = "hi",
    streamed: tuple[str | StreamedOutput, ...] = ("text",),
    attach_only: bool = False,
) -> StepSpec:
    """Returns the spec of a step with a prompt for a source."""
    return StepSpec(
        step_id=f"{request_id}/thinker/{attempt}",
        attempt=attempt,
        task=Task(request_id=request_id, seed=1, prompt=content),
        streamed=tuple(StreamedOutput(each) if isinstance(each, str) else each for each in streamed),
        fingerprint=content.encode(),
        attach_only=attach_only,
    )


def step_request(
    request_id: str = "r", *, stage: str = "thinker", text: str = "hi", attempt: int = 1
) -> stage_pb2.ExecuteStepRequest:
    """Returns the request of the same step, or of a step of another stage. It has no prompt if `text` is empty."""
    return stage_pb2.ExecuteStepRequest(
        request_id=request_id,
        step_id=f"{request_id}/{stage}/{attempt}",
        attempt=attempt,
        input=request_pb2.Input(text=text) if text else None,
        seed=1,
        streamed=[stage_pb2.StreamedOutput(tensor="text")],
    )


async def failure_of(call: Awaitable[object]) -> StagemeshError:
    """Returns the error with which a call of a replica fails."""
    return await error_of(call, peer="stage")


def outputs_of(events: list[stage_pb2.ExecuteStepResponse]) -> list[request_pb2.Output]:
    """Returns the outputs among events."""
    return [event.output for event in events if event.HasField("output")]


async def events_of(runtime: StageRuntime, wanted: StepSpec) -> list[stage_pb2.ExecuteStepResponse]:
    """Returns all events of a step."""
    return [event async for event in runtime.execute(wanted, time_left_s=None)]
