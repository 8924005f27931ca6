"""The peer of a measurement: a gRPC service that receives flows and reports the arrival times of the packets.

The service is added to an existing gRPC server, or runs in a separate process on this host: `python -m
stagemesh.bench.transport.peer`.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from typing import Any, Self, TypeAlias

import grpc
import numpy as np
import uvloop

from stagemesh.common.errors import InvalidRequestError, NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import descriptors, number_of
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.common.wire.versions import OFFERS, own_protocol
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.rpc.channels import SERVER_OPTIONS
from stagemesh.rpc.handlers import add_stage_service, answering, streaming
from stagemesh.v1 import request_pb2, stage_pb2, stage_pb2_grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

PIPELINE = "probe-transport"
ENGINE = "probe"
EACH = "each"
"""The name of the step option that requests an immediate report of each packet's arrival.

A step always reports a summary at the end of its flow.
"""
_HOST = "127.0.0.1"
_START_S, _END_S = 20.0, 5.0
"""The time limits in seconds for starting and for stopping the peer process that `second_process` starts."""
ARRIVED, SUMMARY = "arrived_ns", "summary"
"""The names of a step's outputs. The values of both outputs are in nanoseconds.

ARRIVED contains the arrival time of one packet. SUMMARY contains the arrival time of the last packet, and the processor
time that the peer's process has used during the step.
"""
MIB = 1 << 20
ARENA_BYTES, WINDOW_BYTES = 64 * MIB, 32 * MIB


def make_plane(replica: str) -> DataPlane:
    """Creates a data plane with the replica name `replica` for a measurement.

    Raises NotReadyError if not enough shared memory is available.
    """
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
    """The stage service of a probe peer. Each step receives a flow and reports the arrival times of the flow's packets.

    Create the service in a running event loop.
    """

    def __init__(self) -> None:
        self._replica = f"peer-{os.getpid()}"
        self._plane = make_plane(self._replica)

    @classmethod
    @asynccontextmanager
    async def added_to(cls, server: grpc.aio.Server) -> AsyncGenerator[Self]:
        """Adds a new peer to `server` and yields the peer. Closes the peer at the end of the `async with` block."""
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
            protocol=own_protocol(OFFERS),
        )

    @streaming
    async def PutChunk(  # type: ignore[override] # noqa: N802
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> AsyncIterator[bytes]:
        """Serves a producer's PutChunk stream until the stream ends. Receives and yields serialized messages."""
        async with answering(context), aclosing(self._plane.serve_put(request_iterator)) as replies:
            async for reply in replies:
                yield reply

    @streaming
    async def ExecuteStep(  # noqa: N802
        self, request: stage_pb2.ExecuteStepRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.ExecuteStepResponse]:
        """Receives the flow of the request's single input until the flow ends. Yields the measured times as outputs.

        Raises InvalidRequestError if the request does not have exactly one input.
        """
        async with answering(context):
            if len(request.inputs) != 1:
                raise InvalidRequestError(f"a probe step needs exactly one input, not {len(request.inputs)}")
            binding, each = request.inputs[0], request.parameters.options[EACH].flag
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
    """Accesses the memory of a packet as an engine would.

    Reads the first and the last element of every tensor, and returns the sum of these elements.
    """
    return sum(int(tensor.reshape(-1)[place]) for tensor in packet.tensors.values() for place in (0, -1))


def _numbers(name: str, *values: int) -> stage_pb2.ExecuteStepResponse:
    tensor = inline_tensor(name, np.array(values, np.int64))
    return stage_pb2.ExecuteStepResponse(output=request_pb2.Output(name=name, tensor=tensor))


@asynccontextmanager
async def second_process() -> AsyncGenerator[str]:
    """Starts a peer process on this host and yields the peer's "host:port" endpoint.

    The peer process terminates at the end of the `async with` block, or when the calling process terminates. Raises
    NotReadyError (START_FAILED) if the peer process does not start.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield await _endpoint_of(process)
    finally:
        # The peer process terminates when its standard input is closed.
        try:
            await asyncio.wait_for(process.communicate(b""), _END_S)
        except TimeoutError:
            process.kill()
            await process.communicate()


async def _endpoint_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
    except TimeoutError:
        message = f"a second process did not start within {_START_S:g} s; try again"
        raise NotReadyError(message, reason="START_FAILED") from None
    if not line:
        said = (await process.stderr.read()).decode().strip()
        raise NotReadyError(f"a second process cannot be measured: {said}", reason="START_FAILED")
    return line.decode().strip()


async def _serve() -> None:
    """Runs a peer on a free port until the standard input is closed. Writes the peer's endpoint to standard output."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    async with ProbePeer.added_to(server):
        port = server.add_insecure_port(f"{_HOST}:0")
        await server.start()
        sys.stdout.write(f"{_HOST}:{port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)
        await server.stop(0)


if __name__ == "__main__":
    try:
        uvloop.run(_serve())
    except StagemeshError as exc:
        sys.exit(exc.message)
