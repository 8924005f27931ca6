"""Data planes that are connected over real gRPC on loopback, and functions that send and compare packets."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc
import numpy as np

from stagemesh.common.connector_descriptors import AUTO, ConnectorName
from stagemesh.common.errors import StagemeshError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import ChunkPolicy, EdgeKey, Packet, StepPolicy
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import FanOut, Outlet
from stagemesh.rpc.channels import SERVER_OPTIONS
from stagemesh.rpc.error_mapping import to_grpc_code, to_trailing_metadata
from stagemesh.rpc.raw_methods import add_stage_service
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

SETTLING_S = 5.0
"""The number of seconds within which unused memory must be freed."""


class Host(stage_pb2_grpc.StageServiceServicer):
    """A data plane with a gRPC server that serves PutChunk and GetChunk, like a stage."""

    def __init__(self, replica: str, **limits: int) -> None:
        self.plane = DataPlane(replica=replica, pipeline="p", generation="g", **{"arena_bytes": 16 << 20, **limits})
        self.replica = replica
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_stage_service(self, self.server)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    @classmethod
    async def started(cls, replica: str, **limits: int) -> Self:
        """Creates and starts a host. The caller must close it."""
        host = cls(replica, **limits)
        await host.server.start()
        return host

    async def PutChunk(  # type: ignore[override] # noqa: N802 - the API defines the names of RPCs
        self, request_iterator: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Serves a stream of a producer's data plane."""
        try:
            async for response in self.plane.serve_put(request_iterator):
                yield response
        except StagemeshError as exc:
            await context.abort(to_grpc_code(exc), exc.message, to_trailing_metadata(exc))

    async def GetChunk(  # noqa: N802 - the API defines the names of RPCs
        self, request: stage_pb2.GetChunkRequest, context: Any
    ) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        """Replays the retained chunks of a flow."""
        key = EdgeKey(request.key.request_id, request.key.edge, request.key.attempt)
        try:
            async for response in self.plane.replay(key, first_seq=request.first_seq):
                yield response
        except StagemeshError as exc:
            await context.abort(to_grpc_code(exc), exc.message, to_trailing_metadata(exc))

    async def close(self) -> None:
        """Closes the data plane and the server. Idempotent."""
        try:
            await self.plane.close()
        finally:
            await self.server.stop(None)

    async def settled(self) -> None:
        """Waits until the replica's memory is empty. Raises TimeoutError if the memory does not become empty."""
        await emptied(lambda: self.used_bytes)

    @property
    def used_bytes(self) -> int:
        """The number of bytes in use in the arena and in the memory for fetched chunks."""
        landing = self.plane.landing.present
        return self.plane.arena.used_bytes + (landing.used_bytes if landing is not None else 0)


@asynccontextmanager
async def two_hosts(**limits: int) -> AsyncGenerator[tuple[Host, Host]]:
    """Yields a producer "a-0" and a consumer "b-0"."""
    producer, consumer = await Host.started("a-0", **limits), await Host.started("b-0", **limits)
    try:
        yield producer, consumer
    finally:
        await producer.close()
        await consumer.close()


def open_flow(
    producer: Host,
    consumer: Host,
    *,
    request: str = "r",
    connector: ConnectorName = AUTO,
    policy: ChunkPolicy | None = None,
    endpoint: str = "",
) -> tuple[Outlet, Inlet]:
    """Opens a flow and returns its outlet and inlet. `endpoint` replaces the consumer's endpoint unless it is empty."""
    key = EdgeKey(request, "a->b", 1)
    inlet = consumer.plane.open_inlet(key, producer=producer.replica)
    outlet = producer.plane.open_outlet(
        key,
        endpoint=endpoint or consumer.endpoint,
        consumer=consumer.replica,
        connector=connector,
        policy=policy or StepPolicy(),
    )
    return outlet, inlet


def packet(seq: int, size: int = 1000) -> Packet:
    """Returns a packet with `size` pseudorandom floats that are determined by `seq`."""
    rng = np.random.default_rng(seq)
    return Packet({"x": rng.standard_normal(size).astype(np.float32), "n": np.array([seq], np.int64)}, {"seq": seq})


async def emptied(used_bytes: Callable[[], int]) -> None:
    """Waits until `used_bytes()` returns 0. Raises TimeoutError after SETTLING_S seconds."""
    # Memory that only the garbage collector frees is not a leak. The collector runs only once, because it blocks the
    # event loop.
    gc.collect()
    await until(lambda: not used_bytes(), timeout_s=SETTLING_S)


async def until(holds: Callable[[], bool], *, timeout_s: float) -> None:
    """Waits until `holds()` returns True. Raises TimeoutError if that does not happen within `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - there is no event for every condition
            await asyncio.sleep(0.001)


async def send_all(outlet: Outlet | FanOut, packets: Iterable[Packet]) -> None:
    """Sends packets and ends the flow. Waits until the consumer has received all packets."""
    for one in packets:
        await outlet.send(one)
    await outlet.finish()


async def receive_all(inlet: Inlet) -> list[Packet]:
    """Returns copies of all packets of a flow and closes the inlet.

    Views of the packets would retain the arena's memory.
    """
    received = [Packet({n: t.copy() for n, t in got.tensors.items()}, got.metadata) async for got in inlet]
    await inlet.aclose()
    return received


def assert_same(received: Sequence[Packet], sent: Sequence[Packet]) -> None:
    """Fails unless the packets are equal in number, order, metadata, names, dtypes, shapes and bytes."""
    assert [dict(got.metadata) for got in received] == [dict(one.metadata) for one in sent]
    for got, one in zip(received, sent, strict=True):
        assert list(got.tensors) == list(one.tensors)
        for name, tensor in one.tensors.items():
            other = got.tensors[name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), f"tensor {name}"
            assert other.tobytes() == tensor.tobytes(), f"tensor {name} has other bytes"
