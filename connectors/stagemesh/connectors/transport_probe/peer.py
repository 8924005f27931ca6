"""The receiving side of a measurement, which receives flows and reports the arrival times of their packets."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from stagemesh.common.connector_descriptors import descriptors, number_of
from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.tensors import inline_tensor
from stagemesh.common.versions import WIRE_VERSION
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import EdgeKey, Packet
from stagemesh.connectors.transport_probe.report import MIB
from stagemesh.rpc.handlers import add_stage_service, answering
from stagemesh.v1 import request_pb2, stage_pb2, stage_pb2_grpc

if TYPE_CHECKING:
    import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

PIPELINE = "probe-transport"
ENGINE = "probe"
EACH = "each"
"""The option that makes a step report the arrival of each packet immediately, in addition to the final summary."""
ARRIVED, SUMMARY = "arrived_ns", "summary"
"""The names of the outputs of a step, whose values are in nanoseconds.

ARRIVED contains the arrival time of a packet. SUMMARY contains the arrival time of the last packet and the processor
time that the step has used.
"""
ARENA_BYTES, WINDOW_BYTES = 64 * MIB, 32 * MIB


def make_plane(replica: str) -> DataPlane:
    """Creates a data plane for a measurement. Raises NotReadyError (NO_MEMORY) if not enough memory is available."""
    try:
        return DataPlane(
            replica=replica,
            pipeline=PIPELINE,
            generation=version("stagemesh"),
            arena_bytes=ARENA_BYTES,
            window_bytes=WINDOW_BYTES,
        )
    except NotReadyError as exc:
        raise NotReadyError(
            f"the measurement needs {ARENA_BYTES // MIB} MiB of shared memory in each process, which is not available; "
            f"give the host or container more memory ({exc.message})",
            reason=exc.reason,
        ) from exc


class ProbePeer(stage_pb2_grpc.StageServiceServicer):
    """A stage whose steps receive a flow and report its arrival times. Create it within a running event loop."""

    def __init__(self) -> None:
        self._replica = f"peer-{os.getpid()}"
        self._plane = make_plane(self._replica)

    @classmethod
    @asynccontextmanager
    async def added_to(cls, server: "grpc.aio.Server") -> AsyncGenerator[Self]:
        """Adds a new peer to `server` and yields it. The peer is closed at the end of the `async with` block."""
        peer = cls()
        try:
            add_stage_service(peer, server)
            yield peer
        finally:
            await peer._plane.close()

    async def Describe(  # noqa: N802 - the API defines the names of RPCs
        self, request: stage_pb2.DescribeRequest, context: _Context
    ) -> stage_pb2.DescribeResponse:
        """Returns a description that identifies this process as a probe peer."""
        del request, context
        return stage_pb2.DescribeResponse(
            pipeline=PIPELINE,
            generation=version("stagemesh"),
            stage="peer",
            replica=self._replica,
            incarnation=self._plane.incarnation,
            engine=ENGINE,
            state=stage_pb2.REPLICA_STATE_READY,
            connectors=[number_of(each.name) for each in descriptors().values() if not each.missing()],
            wire_version=WIRE_VERSION,
        )

    # The next two methods write responses instead of yielding them, so that they end together with their RPC. A
    # generator would end only when it is garbage-collected.

    async def PutChunk(  # type: ignore[override] # noqa: N802
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> None:
        """Serves a stream of a producer's data plane."""
        async with answering(context), aclosing(self._plane.serve_put(request_iterator)) as replies:
            async for reply in replies:
                await context.write(reply)

    async def ExecuteStep(  # type: ignore[override] # noqa: N802
        self, request: stage_pb2.ExecuteStepRequest, context: _Context
    ) -> None:
        """Receives the flow of the request's only input to its end, and writes the measured times as outputs."""
        async with answering(context), aclosing(self._receive(request)) as responses:
            async for response in responses:
                await context.write(response)

    async def _receive(self, request: stage_pb2.ExecuteStepRequest) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        if len(request.inputs) != 1:
            raise InvalidRequestError(f"a probe step needs exactly one input, not {len(request.inputs)}")
        binding, each = request.inputs[0], bool(request.parameters.options[EACH])
        inlet = self._plane.open_inlet(
            EdgeKey(request.request_id, binding.edge, request.attempt), producer=binding.producer
        )
        used_ns, arrived_ns = time.process_time_ns(), 0
        try:
            yield stage_pb2.ExecuteStepResponse(accepted=stage_pb2.StepAccepted())
            async for packet in inlet:
                touch(packet)
                arrived_ns = time.monotonic_ns()
                if each:
                    yield _numbers(ARRIVED, arrived_ns)
            yield _numbers(SUMMARY, arrived_ns, time.process_time_ns() - used_ns)
            yield stage_pb2.ExecuteStepResponse(finished=stage_pb2.StepFinished())
        finally:
            await inlet.aclose()
            # Sends the flow's last message now, so that it does not delay the next flow.
            await asyncio.sleep(0)


def touch(packet: Packet) -> int:
    """Reads the first and the last element of each tensor of a packet and returns their sum."""
    return sum(int(tensor.reshape(-1)[place]) for tensor in packet.tensors.values() for place in (0, -1))


def _numbers(name: str, *values: int) -> stage_pb2.ExecuteStepResponse:
    tensor = inline_tensor(name, np.array(values, np.int64))
    return stage_pb2.ExecuteStepResponse(output=request_pb2.Output(name=name, tensor=tensor))
