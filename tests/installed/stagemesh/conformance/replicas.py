"""Replicas for tests, and functions that send and compare packets.

A `Host` runs a data plane that connects to other hosts over real gRPC on loopback. An `End` has only arenas and a
connector, without flows.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc
import numpy as np

from stagemesh.common.plugins.connectors import AUTO, ConnectorName
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, StepPolicy
from stagemesh.connectors.arena.arena import Arena, Written
from stagemesh.connectors.base import (
    ArenaRange,
    Bytes,
    Connector,
    FetchingReader,
    InPlaceReader,
    MemoryAccount,
    Producer,
    Reader,
)
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import NO_ROWS, FanOut, Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.connectors.stream.connector_agreement import ReplicaConnectors
from stagemesh.connectors.stream.consumer import LandingArena
from stagemesh.connectors.wire import key_from_wire
from stagemesh.rpc.channels import SERVER_OPTIONS
from stagemesh.rpc.handlers import add_stage_service, answering, streaming
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

ARENA_BYTES = 8 << 20
"""The size in bytes of the arena of an `End`."""
SETTLING_S = 30.0
"""The time limit in seconds for freeing memory that is no longer used."""


class Host(stage_pb2_grpc.StageServiceServicer):
    """A data plane with a gRPC server that serves PutChunk and GetChunk, as a stage does.

    It listens at `listen`, "host:port", where port 0 selects a free port. `limits` are arguments of DataPlane, such as
    size limits in bytes.
    """

    def __init__(self, replica: str, *, listen: str = "127.0.0.1:0", **limits: Any) -> None:
        arguments: dict[str, Any] = {"arena_bytes": 16 << 20, **limits}
        self.plane = DataPlane(replica=replica, pipeline="p", generation="g", **arguments)
        self.replica = replica
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_stage_service(self, self.server)
        self.endpoint = f"{listen.rpartition(':')[0]}:{self.server.add_insecure_port(listen)}"

    @classmethod
    async def started(cls, replica: str, **arguments: Any) -> Self:
        """Creates a host and starts its server. The caller must close the host."""
        host = cls(replica, **arguments)
        await host.server.start()
        return host

    @streaming
    async def PutChunk(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Serves a producer's PutChunk stream until the stream ends. Receives and yields serialized messages."""
        async with answering(context), aclosing(self.plane.serve_put(request_iterator)) as responses:
            async for response in responses:
                yield response

    @streaming
    async def GetChunk(
        self, request: stage_pb2.GetChunkRequest, context: Any
    ) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        """Yields the chunks of the requested flow, beginning with chunk `request.first_seq`."""
        async with answering(context):
            replay = self.plane.replay(key_from_wire(request.key), first_seq=request.first_seq)
            async with aclosing(replay) as responses:
                async for response in responses:
                    yield response

    async def close(self) -> None:
        """Closes the data plane and the server. Idempotent."""
        try:
            await self.plane.close()
        finally:
            await self.server.stop(None)

    async def settled(self) -> None:
        """Waits until `used_bytes` is 0. Raises TimeoutError if memory is still in use after SETTLING_S seconds."""
        await emptied(lambda: self.used_bytes)

    @property
    def used_bytes(self) -> int:
        """The number of bytes in use in the arena and in the memory for fetched chunks."""
        landing = self.plane.landing.present
        return self.plane.arena.used_bytes + (landing.used_bytes if landing is not None else 0)


@asynccontextmanager
async def two_hosts(**limits: Any) -> AsyncGenerator[tuple[Host, Host]]:
    """Starts two hosts and yields them: the producer "a-0" and the consumer "b-0". Closes both hosts at the end.

    `limits` are arguments of both data planes, such as size limits in bytes.
    """
    producer, consumer = await Host.started("a-0", **limits), await Host.started("b-0", **limits)
    try:
        yield producer, consumer
    finally:
        await producer.close()
        await consumer.close()


class End:
    """The arenas and the connector of one replica, which can be a producer or a consumer."""

    def __init__(self, name: ConnectorName, *, replica: str, incarnation: str = "1") -> None:
        self.replica, self.incarnation = replica, incarnation
        self.arena = Arena(ARENA_BYTES)
        self._landing = LandingArena(ARENA_BYTES)
        self._connectors = ReplicaConnectors(
            self.arena, landing=self._landing.get, replica=replica, incarnation=incarnation
        )
        self.connector: Connector = self._connectors.get(name)

    async def settled(self) -> None:
        """Waits until the memory for fetched chunks is empty.

        Raises TimeoutError if the memory is not empty after SETTLING_S seconds.
        """
        landing = self._landing.present
        if landing is not None:
            await emptied(lambda: landing.used_bytes)

    async def write(self, content: Bytes) -> tuple[Written, ArenaRange]:
        """Writes bytes into the arena. Returns the written tensor with its region, and the tensor's arena range."""
        written = await self.arena.write({"x": content}, MemoryAccount())
        return written, written.places[0]

    def as_producer(self, *, with_arena: bool = True) -> Producer:
        """Returns the Producer object that describes this replica to a consumer on the same host.

        `with_arena` is whether the producer passes the file descriptor of its arena to the consumer.
        """
        return Producer(self.replica, self.incarnation, self.arena.fd if with_arena else None)

    async def connect(self, producer: "End") -> Reader:
        """Connects to the arena of `producer` and returns a reader of that arena."""
        return await self.connector.connect(await producer.connector.offer(), producer.as_producer())

    async def close(self) -> None:
        """Closes the connector and the arenas. Idempotent."""
        await self._connectors.close()
        self.arena.close()
        await self._landing.close()


@dataclass(frozen=True)
class Connected:
    """A producer, a consumer, and the consumer's reader of the producer's arena."""

    producer: End
    consumer: End
    reader: Reader

    async def read(self, *places: ArenaRange) -> list[Bytes]:
        """Reads ranges of the producer's arena and returns one array of bytes for each range.

        Uses `view` or `fetch`, as the reader's class requires.
        """
        if isinstance(self.reader, InPlaceReader):
            return [self.reader.view(place) for place in places]
        assert isinstance(self.reader, FetchingReader), "a reader reads in place or fetches"
        return await self.reader.fetch(places, MemoryAccount())


def open_outlet(
    producer: Host,
    consumer: Host,
    *,
    request: str = "r",
    attempt: int = 1,
    connector: ConnectorName = AUTO,
    policy: ChunkPolicy | None = None,
    endpoint: str = "",
    rebind_s: float = 0.0,
    first_rows: Mapping[str, int] = NO_ROWS,
) -> Outlet:
    """Opens the producer's end of a flow.

    `request` is the id of the flow's request. `policy` determines how packets are cut into chunks. If `policy` is None,
    StepPolicy is used. The producer connects to `endpoint`, or to the consumer's endpoint if `endpoint` is empty. It
    waits `rebind_s` seconds for a successor of a lost consumer. An earlier producer has sent `first_rows` rows of each
    tensor.
    """
    return producer.plane.open_outlet(
        EdgeKey(request, "a->b", attempt),
        ConsumerAddress(consumer.replica, endpoint or consumer.endpoint),
        connector=connector,
        policy=policy or StepPolicy(),
        rebind_s=rebind_s,
        first_rows=first_rows,
    )


def open_flow(
    producer: Host,
    consumer: Host,
    *,
    request: str = "r",
    ticket_kinds: Sequence[str] = (),
    rebind_s: float = 0.0,
    **outlet: Any,
) -> tuple[Outlet, Inlet]:
    """Opens a flow from `producer` to `consumer`. Returns the flow's outlet and inlet.

    The reader accepts tickets of `ticket_kinds`. `outlet` has further arguments of `open_outlet`.
    """
    key = EdgeKey(request, "a->b", 1)
    inlet = consumer.plane.open_inlet(key, producer=producer.replica, ticket_kinds=ticket_kinds, rebind_s=rebind_s)
    return open_outlet(producer, consumer, request=request, rebind_s=rebind_s, **outlet), inlet


def content(size_bytes: int, seed: int) -> Bytes:
    """Returns `size_bytes` pseudorandom bytes. The same seed yields the same bytes."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def packet(seq: int, size: int = 1000) -> Packet:
    """Returns a packet that contains `size` pseudorandom floats and the number `seq`.

    Calls with the same `seq` and `size` return equal packets.
    """
    rng = np.random.default_rng(seq)
    return Packet({"x": rng.standard_normal(size).astype(np.float32), "n": np.array([seq], np.int64)}, {"seq": seq})


async def emptied(used_bytes: Callable[[], int]) -> None:
    """Waits until `used_bytes()` returns 0. Raises TimeoutError if it does not return 0 within SETTLING_S seconds."""
    # Memory that only the garbage collector frees is not a leak. The collector runs only once, because it blocks the
    # event loop.
    gc.collect()
    await until(lambda: not used_bytes(), timeout_s=SETTLING_S)


async def until(holds: Callable[[], bool], *, timeout_s: float) -> None:
    """Waits until `holds()` returns True. Raises TimeoutError if it does not return True within `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.001)


async def send_all(outlet: Outlet | FanOut, packets: Iterable[Packet]) -> None:
    """Sends packets and ends the flow. Waits until the consumer has received all packets."""
    for one in packets:
        await outlet.send(one)
    await outlet.finish()


async def receive_all(inlet: Inlet) -> list[Packet]:
    """Returns copies of all packets of a flow and closes the inlet.

    The received packets themselves are not returned, because they may be views that retain the arena's memory.
    """
    received = [Packet({n: t.copy() for n, t in got.tensors.items()}, got.metadata) async for got in inlet]
    await inlet.aclose()
    return received


async def exchange(outlet: Outlet, inlet: Inlet, packets: Sequence[Packet]) -> list[Packet]:
    """Sends packets over a flow, ends the flow, and returns copies of the received packets."""
    _, received = await asyncio.gather(send_all(outlet, packets), receive_all(inlet))
    return received


def assert_same(received: Sequence[Packet], sent: Sequence[Packet]) -> None:
    """Raises AssertionError unless `received` and `sent` contain equal packets in the same order.

    Compares the metadata of the packets, and the names, dtypes, shapes and bytes of the tensors.
    """
    assert [dict(got.metadata) for got in received] == [dict(one.metadata) for one in sent]
    for got, one in zip(received, sent, strict=True):
        assert list(got.tensors) == list(one.tensors)
        for name, tensor in one.tensors.items():
            other = got.tensors[name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), f"tensor {name}"
            assert other.tobytes() == tensor.tobytes(), f"tensor {name} has other bytes"
