"""Idle sessions: the memory that each needs in the orchestrator, and the delay that they add to requests of others."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

from benchmarks.memory import memory_bytes
from benchmarks.orchestrator_paths.processes import Deployment, console, deployed, started, until_listening
from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc

PIPELINE = """
pipeline: idle
stages:
  writer: {{engine: fake, function: source, options: {{steps: 16, step_s: 0.001}}}}
outputs: {{text: writer}}
limits: {{max_sessions: 4000}}
sessions: {{park_s: {park_s}}}
"""
_WARM, _BATCH = 200, 100
_PARKED_FACTOR = 4
"""The number of parked sessions for each open one. They are small, so that fewer would fit into memory freed before."""
_SETTLE_S = 2.0
_HISTORY = 600
"""The number of requests after which the orchestrator's history of requests does not grow any more."""
_KEPT_S = 32.0
"""The time for which the orchestrator keeps an ended request, and a little more."""
_PARKING_S = 60.0
_NO_PARKING = 0.0
_QUICK_PARKING_S = 2.0
# Calls stay open while requests are measured, and parked sessions end when the next round begins.
_MEASURED_S, _PARK_S = 6.0, 12.0
_LOOPS = 2


@dataclass(frozen=True)
class Memory:
    """The memory of the orchestrator per idle session, and of a minimal server per gRPC stream, in bytes."""

    open_bytes: float
    parked_bytes: float
    stream_bytes: float


@dataclass(frozen=True)
class Delays:
    """The p99 of requests in one round, in seconds: without sessions, with open calls, and with parked sessions."""

    alone_s: float
    open_s: float
    parked_s: float
    in_flight: int
    """The number of requests that ran while all sessions were idle."""


async def measure_memory(count: int) -> Memory:
    """Returns the memory of `count` idle sessions, each of which has had a turn."""
    return Memory(
        open_bytes=await _measure_open(count),
        parked_bytes=await _measure_parked(count),
        stream_bytes=await _measure_streams(count),
    )


async def measure_delays(count: int, *, rounds: int) -> list[Delays]:
    """Returns the delays of requests without and with `count` idle sessions, in alternation."""
    found: list[Delays] = []
    async with _serving(park_s=_PARK_S) as (deployment, channel):
        await _p99_s(channel)
        for number in range(rounds):
            alone_s = await _p99_s(channel)
            calls = [await _open_session(channel, linger_s=int(2 * _MEASURED_S)) for _ in range(count)]
            in_flight = (await _status(deployment)).in_flight
            open_s = await _p99_s(channel)
            await _until_ended(calls)
            parked_s = await _p99_s(channel)
            found.append(Delays(alone_s, open_s, parked_s, in_flight))
            console.print(f"round {number + 1} of {rounds}: {found[-1]}")
            await _until_none(deployment)
    return found


async def _until_none(deployment: Deployment) -> None:
    async with asyncio.timeout(_PARKING_S), open_channel(deployment.admin_endpoint) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        async for state in stub.WatchPipeline(admin_pb2.WatchPipelineRequest(interval_s=1)):
            if not state.pipeline.sessions:
                return


async def _measure_open(count: int) -> float:
    async with _serving(park_s=_NO_PARKING) as (deployment, channel):
        await _fill_history(channel)
        warm = [await _open_session(channel) for _ in range(_WARM)]
        before = await _settled_bytes(deployment)
        calls = [await _open_session(channel) for _ in range(count)]
        after = await _settled_bytes(deployment)
        for call in (*warm, *calls):
            call.cancel()
    return (after - before) / count


async def _measure_parked(count: int) -> float:
    async with _serving(park_s=_QUICK_PARKING_S) as (deployment, channel):
        await _fill_history(channel)
        await _park(channel, _WARM)
        before = await _settled_bytes(deployment)
        await _park(channel, _PARKED_FACTOR * count)
        return (await _settled_bytes(deployment) - before) / (_PARKED_FACTOR * count)


async def _fill_history(channel: grpc.aio.Channel) -> None:
    for _ in range(_HISTORY):
        await _ask(channel)


async def _ask(channel: grpc.aio.Channel) -> None:
    request = orchestrator_pb2.GenerateRequest()
    request.input.text = "hello"
    async for _ in orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(request):
        pass


async def _park(channel: grpc.aio.Channel, count: int) -> None:
    # In batches, so that the memory of the open calls is used again.
    for _ in range(0, count, _BATCH):
        await _until_ended([await _open_session(channel) for _ in range(_BATCH)])


async def _measure_streams(count: int) -> float:
    endpoint = f"127.0.0.1:{PortPicker().pick()}"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(started("benchmarks.session_parts.bare_streams", "--listen", endpoint))
        await until_listening(endpoint)
        channel = await stack.enter_async_context(open_channel(endpoint))
        open_stream: Any = cast("Any", channel).stream_stream("/bare.Streams/Open", None, None)
        calls = [await _open_stream(open_stream()) for _ in range(_WARM)]
        await asyncio.sleep(_SETTLE_S)
        before = memory_bytes(server.pid)
        calls += [await _open_stream(open_stream()) for _ in range(count)]
        await asyncio.sleep(_SETTLE_S)
        after = memory_bytes(server.pid)
        for call in calls:
            call.cancel()
    return (after - before) / count


async def _open_stream(call: Any) -> Any:
    await call.write(b"hello")
    await call.read()
    return call


@asynccontextmanager
async def _serving(*, park_s: float) -> AsyncGenerator[tuple[Deployment, grpc.aio.Channel]]:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = PIPELINE.format(park_s=park_s)
        deploying = deployed(Path(folder), pipeline, replicas=1, farms=1)
        async with deploying as deployment, open_channel(deployment.endpoint) as channel:
            yield deployment, channel


async def _open_session(channel: grpc.aio.Channel, *, linger_s: int = 3600) -> Any:
    """Opens a session, has one turn answered, and returns the open call."""
    call: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Converse()
    await call.write(orchestrator_pb2.ConverseRequest(open=orchestrator_pb2.SessionOpen(linger_s=linger_s)))
    piece = orchestrator_pb2.InputAppend(part={"text": "hello"})  # type: ignore[arg-type]
    await call.write(orchestrator_pb2.ConverseRequest(seq=1, append=piece))
    await call.write(orchestrator_pb2.ConverseRequest(seq=2, commit=orchestrator_pb2.TurnCommit()))
    while not (await call.read()).HasField("ended"):
        pass
    return call


async def _until_ended(calls: Sequence[Any]) -> None:
    async with asyncio.timeout(_PARKING_S):
        await asyncio.gather(*(call.code() for call in calls))


async def _settled_bytes(deployment: Deployment) -> int:
    await asyncio.sleep(_KEPT_S)
    return memory_bytes(deployment.orchestrator.pid)


async def _status(deployment: Deployment) -> admin_pb2.PipelineStatus:
    async with open_channel(deployment.admin_endpoint) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return (await stub.ListPipelines(admin_pb2.ListPipelinesRequest(page_size=1))).pipelines[0]


async def _p99_s(channel: grpc.aio.Channel) -> float:
    """Returns the p99 of the durations of requests, which run for a few seconds, two at a time."""
    durations_s, ends_s = list[float](), time.monotonic() + _MEASURED_S

    async def ask() -> None:
        while (began_s := time.monotonic()) < ends_s:
            await _ask(channel)
            durations_s.append(time.monotonic() - began_s)

    await asyncio.gather(*(ask() for _ in range(_LOOPS)))
    return statistics.quantiles(durations_s, n=100)[98]
