"""Stagemesh's own way: the data planes of two replicas, with an edge between them by a given connector."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc
import numpy as np

from benchmarks.edge_ways.base import Bytes, Receiver, Sender, check_mark, mark, source
from benchmarks.edge_ways.worker import readable, receive
from stagemesh.common.plugins.connectors import GRPC, NIXL, SHM, ConnectorName
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import FanOut, Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.rpc.channels import SERVER_OPTIONS
from stagemesh.rpc.handlers import answering

ARENA_BYTES = 512 << 20
WINDOW_BYTES = 128 << 20
"""The size of two of the largest tensors, so that credit does not limit a single one."""
STREAMS = 32
CHUNK_BYTES = 64 << 10
LARGE_BYTES = 64 << 20
PERIOD_S = 0.004
"""The time between small chunks that are sent while large tensors are sent."""

_MAIN, _LARGE = "main", "large"
_STREAMS = [f"stream {number}" for number in range(STREAMS)]


def _plane(replica: str, *, shared_arena: bool = True) -> DataPlane:
    return DataPlane(
        replica=replica,
        pipeline="bench",
        generation="1",
        arena_bytes=ARENA_BYTES,
        window_bytes=WINDOW_BYTES,
        shared_arena=shared_arena,
    )


def _key(request: str) -> EdgeKey:
    return EdgeKey(request, "a->b", 1)


class PlaneSender(Sender):
    """The producing replica."""

    connector: ClassVar[ConnectorName]
    shared_arena: ClassVar[bool] = True

    async def open(self) -> None:
        self._plane = _plane("producer", shared_arena=self.shared_arena)
        self._consumers: list[tuple[str, str]] = [await receive(peer) for peer in self.peers]
        self._opened: dict[str, list[Outlet]] = {}
        self._main: FanOut | None = None
        # Connects, so that a connector that does not work here fails now.
        await self.send(np.zeros(CHUNK_BYTES, np.uint8))

    async def close(self) -> None:
        await self._plane.close()

    async def send(self, tensor: Bytes) -> None:
        packet = Packet({"x": tensor})
        if self._main is None:
            self._main = self._plane.fan_out()
            for outlet in self._outlets(_MAIN):
                self._main.add(outlet)
        await self._main.send(packet)

    async def copied_bytes(self) -> int:
        """Returns the bytes that this replica has copied into its arena."""
        return self._plane.arena.copied_bytes

    async def send_many(self, *, size_bytes: int, count: int) -> None:
        """Sends tensors as fast as possible and returns when all have arrived."""
        tensor, arrived = source(size_bytes), readable(self.peers[0])
        for _ in range(count):
            await self.send(tensor)
        await arrived
        self.peers[0].recv_bytes()

    async def send_steps(self, *, steps: int) -> float:
        """Sends a chunk of every stream in each step, like an engine with its batch. Returns the start time in s."""
        outlets = [self._outlets(request)[0] for request in _STREAMS]
        packet = Packet({"x": source(CHUNK_BYTES)})
        begin = time.monotonic()
        for _ in range(steps):
            for outlet in outlets:
                await outlet.send(packet)
            await asyncio.sleep(0)
        return begin

    async def send_beside(self, *, count: int, large: bool) -> list[int]:
        """Sends small chunks at a steady rate, with or without large tensors. Returns the time of each in ns."""
        stop = asyncio.Event()
        # Creating the large tensor would block the event loop for longer than sending it.
        source(LARGE_BYTES)
        beside = asyncio.create_task(self._send_large(stop)) if large else None
        tensor, starts = source(CHUNK_BYTES), list[int]()
        begin_ns = time.monotonic_ns()
        for number in range(count):
            due_ns = begin_ns + int((number + 1) * PERIOD_S * 1e9)
            await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
            mark(tensor, number)
            # A late start counts, because the event loop may have been blocked.
            starts.append(due_ns)
            await self.send(tensor)
        stop.set()
        if beside is not None:
            await beside
        return starts

    async def _send_large(self, stop: asyncio.Event) -> None:
        """Sends a large tensor whenever the previous one has arrived, and in the end a small one."""
        outlet = self._outlets(_LARGE)[0]
        while not stop.is_set():
            arrived = readable(self.peers[0])
            await outlet.send(Packet({"x": source(LARGE_BYTES)}))
            await arrived
            self.peers[0].recv_bytes()
        await outlet.send(Packet({"x": np.zeros(1, np.uint8)}))

    def _outlets(self, request: str) -> list[Outlet]:
        if request not in self._opened:
            self._opened[request] = [
                self._plane.open_outlet(
                    _key(request), ConsumerAddress(replica, endpoint), connector=self.connector, policy=StepPolicy()
                )
                for replica, endpoint in self._consumers
            ]
        return self._opened[request]


class PlaneReceiver(Receiver):
    """The consuming replica."""

    async def open(self) -> None:
        replica = f"consumer {os.getpid()}"
        self._plane = _plane(replica)
        self._inlets: dict[str, Inlet] = {
            request: self._plane.open_inlet(_key(request), producer="producer")
            for request in (_MAIN, _LARGE, *_STREAMS)
        }
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((stage_service(self._plane),))
        port = self._server.add_insecure_port(f"{self.place.address}:0")
        await self._server.start()
        self.peers[0].send((replica, f"{self.place.address}:{port}"))
        await self.receive(CHUNK_BYTES)

    async def close(self) -> None:
        await self._plane.close()
        await self._server.stop(None)

    async def copied_bytes(self) -> int:
        """Returns the bytes that this replica has copied into its arenas, without fetched or streamed bytes."""
        landing = self._plane.landing.present
        return self._plane.arena.copied_bytes + (landing.copied_bytes if landing else 0)

    async def receive(self, size_bytes: int) -> Bytes:  # noqa: ARG002 - the message tells
        return await self._next(_MAIN)

    async def receive_many(self, *, count: int) -> None:
        """Receives the tensors of `send_many`."""
        for _ in range(count):
            await self._next(_MAIN)
        self.peers[0].send_bytes(b"")

    async def receive_steps(self, *, steps: int) -> float:
        """Receives the chunks of `send_steps` and returns the time of the last one in s."""

        async def drain(request: str) -> None:
            for _ in range(steps):
                await self._next(request)

        await asyncio.gather(*(drain(request) for request in _STREAMS))
        return time.monotonic()

    async def receive_beside(self, *, count: int, large: bool) -> list[int]:
        """Receives the small chunks of `send_beside` and returns the time of each in ns."""
        beside = asyncio.create_task(self._receive_large()) if large else None
        ends: list[int] = []
        for number in range(count):
            tensor = await self._next(_MAIN)
            ends.append(time.monotonic_ns())
            check_mark(tensor, number, size_bytes=CHUNK_BYTES)
        if beside is not None:
            await beside
        return ends

    async def _receive_large(self) -> None:
        while (await self._next(_LARGE)).nbytes > 1:
            self.peers[0].send_bytes(b"")

    async def _next(self, request: str) -> Bytes:
        packet = await anext(aiter(self._inlets[request]))
        return packet.tensors["x"].view(np.uint8)


def stage_service(plane: DataPlane) -> grpc.GenericRpcHandler:
    """Returns a handler of the RPC that producers call."""

    async def put(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async with answering(context):
            async for response in plane.serve_put(requests):
                yield response

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(put)
    return grpc.method_handlers_generic_handler("stagemesh.v1.StageService", {"PutChunk": handler})


class ShmSender(PlaneSender):
    """Sends through shared memory."""

    connector = SHM


class NixlSender(PlaneSender):
    """Sends through NIXL from private memory, as a stage does that has `shared_arena: false`."""

    connector = NIXL
    shared_arena = False


class GrpcSender(PlaneSender):
    """Sends through a gRPC stream."""

    connector = GRPC
