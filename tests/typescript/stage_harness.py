"""A replica of the stage in TypeScript between Python data planes, driven as an orchestrator would."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.conformance import Host, assert_same, receive_all, send_all
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2
from tests.connectors.hosts import started_host
from tests.typescript.nodes import QUICK, RunningStage, running_stage

IN, OUT = "a->m", "m->c"


@dataclass
class Step:
    """A call of ExecuteStep, whose events are collected."""

    request: stage_pb2.ExecuteStepRequest
    call: Any
    events: list[stage_pb2.ExecuteStepResponse] = field(default_factory=list[stage_pb2.ExecuteStepResponse])

    async def finished(self) -> list[stage_pb2.ExecuteStepResponse]:
        """Returns all events of the step. Raises AioRpcError if the step fails."""
        while (event := await self.call.read()) is not grpc.aio.EOF:
            self.events.append(event)
        assert await self.call.code() is grpc.StatusCode.OK, self.call.details()
        return self.events


def step_request(
    request_id: str, *, consumer: str, producer: str = "a-0", attempt: int = 1, **fields: Any
) -> stage_pb2.ExecuteStepRequest:
    """Returns the request of a step from `producer` to "c-0", whose endpoint is `consumer`."""
    step_id = f"{request_id}/{attempt}"
    request = stage_pb2.ExecuteStepRequest(request_id=request_id, step_id=step_id, attempt=attempt, **fields)
    request.inputs.add(edge=IN, producer=producer)
    request.outputs.add(edge=OUT, consumer="c-0", endpoint=consumer, connector=chunk_pb2.CONNECTOR_GRPC)
    return request


class Upper:
    """The replica "m-0" of the stage, between the producer "a-0" and the consumer "c-0"."""

    def __init__(self, running: RunningStage, channel: grpc.aio.Channel) -> None:
        self.endpoint, self.process, self.channel = running.endpoint, running.process, channel
        self.stub = stage_pb2_grpc.StageServiceStub(channel)

    async def start(self, request_id: str, **arguments: Any) -> Step:
        """Starts a step with the arguments of `step_request`, and waits until it is accepted."""
        return await self.call(step_request(request_id, **arguments))

    async def call(self, request: stage_pb2.ExecuteStepRequest) -> Step:
        """Calls ExecuteStep and waits until the step is accepted."""
        step = Step(request, self.stub.ExecuteStep(request))
        step.events.append(await step.call.read())
        assert step.events[0].HasField("accepted")
        return step

    async def rebind(self, step: Step, **bindings: Any) -> None:
        """Calls RebindStep."""
        started = step.request
        request = stage_pb2.RebindStepRequest(request_id=started.request_id, step_id=started.step_id, **bindings)
        await self.stub.RebindStep(request, timeout=5)


@asynccontextmanager
async def upper_stage(*arguments: str) -> AsyncIterator[Upper]:
    """Runs the stage in TypeScript for the pipeline of the hosts of the conformance kit."""
    async with (
        running_stage("--pipeline", "p", "--generation", "g", *arguments) as running,
        open_channel(running.endpoint) as channel,
    ):
        yield Upper(running, channel)


def outlet_to(stage_endpoint: str, plane: DataPlane, request_id: str, *, attempt: int = 1) -> Outlet:
    """Opens a flow into the stage in TypeScript."""
    return plane.open_outlet(
        EdgeKey(request_id, IN, attempt), ConsumerAddress("m-0", stage_endpoint), connector="auto", policy=StepPolicy()
    )


def inlet_from(plane: DataPlane, request_id: str, *, attempt: int = 1) -> Inlet:
    """Expects a flow from the stage in TypeScript."""
    return plane.open_inlet(EdgeKey(request_id, OUT, attempt), producer="m-0")


@dataclass(frozen=True)
class Chain:
    """A step of the stage in TypeScript, with a flow from the host "a-0" and a flow to the host "c-0"."""

    stage: Upper
    a: Host
    c: Host
    step: Step
    outlet: Outlet
    inlet: Inlet

    async def convey(self, sent: Sequence[Packet]) -> None:
        """Sends packets. Checks that the stage's packets arrive, and that the step finishes."""
        _, received = await asyncio.gather(send_all(self.outlet, sent), receive_all(self.inlet))
        assert_same(received, upper(sent))
        await self.step.finished()


@asynccontextmanager
async def chain(*, window_bytes: int | None = None, **fields: Any) -> AsyncIterator[Chain]:
    """Starts a step of the request "r" with these fields. `window_bytes` is the window of credit of "c-0"."""
    limits = {} if window_bytes is None else {"window_bytes": window_bytes}
    async with upper_stage(*QUICK) as stage, started_host("a-0") as a, started_host("c-0", **limits) as c:
        inlet = inlet_from(c.plane, "r")
        step = await stage.start("r", consumer=c.endpoint, **fields)
        yield Chain(stage, a, c, step, outlet_to(stage.endpoint, a.plane, "r"), inlet)


def text(seq: int, size_bytes: int) -> Packet:
    """Returns a packet of lower-case letters, the same for the same arguments."""
    letters = np.random.default_rng(seq).integers(ord("a"), ord("z") + 1, size_bytes, np.uint8)
    return Packet({"text": letters}, {"seq": seq})


def texts(count: int, size_bytes: int) -> list[Packet]:
    """Returns packets of lower-case letters."""
    return [text(seq, size_bytes) for seq in range(count)]


def upper(packets: Sequence[Packet]) -> list[Packet]:
    """Computes what the stage computes."""
    return [
        Packet({"text": np.frombuffer(packet.tensors["text"].tobytes().upper(), np.uint8)}, packet.metadata)
        for packet in packets
    ]


def integer(value: int) -> tensor_pb2.TypedValue:
    """Returns the value of an option."""
    return tensor_pb2.TypedValue(integer=value)
