"""Producers and consumers without flows between them, for tests of the connector interface."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from stagemesh.common.connector_descriptors import ConnectorName
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
from stagemesh.connectors.conformance.replicas import emptied
from stagemesh.connectors.replica_connectors import ReplicaConnectors

ARENA_BYTES = 8 << 20


class End:
    """The arenas and the connector of one replica, which can be a producer or a consumer."""

    def __init__(self, name: ConnectorName, *, replica: str, incarnation: str = "1") -> None:
        self.replica, self.incarnation = replica, incarnation
        self.arena = Arena(ARENA_BYTES)
        self._landing: Arena | None = None
        self._connectors = ReplicaConnectors(
            self.arena, landing=self._landing_arena, replica=replica, incarnation=incarnation
        )
        self.connector: Connector = self._connectors.get(name)

    async def settled(self) -> None:
        """Waits until the memory for fetched chunks is empty. Raises TimeoutError if that does not happen."""
        landing = self._landing
        if landing is not None:
            await emptied(lambda: landing.used_bytes)

    async def write(self, content: Bytes) -> tuple[Written, ArenaRange]:
        """Writes bytes into the arena. Returns the written tensor with its region, and its arena range."""
        written = await self.arena.write({"x": content}, MemoryAccount())
        return written, ArenaRange(written.region.offset, content.nbytes, written.region.generation)

    def as_producer(self, *, with_arena: bool = True) -> Producer:
        """Returns a description of this replica as a producer on the consumer's host.

        `with_arena` is whether the producer passes the file descriptor of its arena.
        """
        return Producer(self.replica, self.incarnation, self.arena.fd if with_arena else None)

    async def connect(self, producer: "End") -> Reader:
        """Connects to another replica's arena and returns the reader of that arena."""
        return await self.connector.connect(await producer.connector.offer(), producer.as_producer())

    async def close(self) -> None:
        """Closes the connector and the arenas. Idempotent."""
        await self._connectors.close()
        self.arena.close()
        if self._landing is not None:
            self._landing.close()

    async def _landing_arena(self) -> Arena:
        if self._landing is None:
            self._landing = Arena(ARENA_BYTES)
        return self._landing


@dataclass(frozen=True)
class Connected:
    """A producer and a consumer with a reader of the producer's arena."""

    producer: End
    consumer: End
    reader: Reader

    async def read(self, *places: ArenaRange) -> list[Bytes]:
        """Reads ranges of the producer's arena and returns one array of bytes for each range."""
        return await read(self.reader, places)


async def read(reader: Reader, places: Sequence[ArenaRange]) -> list[Bytes]:
    """Reads ranges and returns one array of bytes for each range.

    Uses `view` or `fetch`, as the reader's class requires.
    """
    if isinstance(reader, InPlaceReader):
        return [reader.view(place) for place in places]
    assert isinstance(reader, FetchingReader), "a reader reads in place or fetches"
    return await reader.fetch(places, MemoryAccount())


@asynccontextmanager
async def ends(name: ConnectorName) -> AsyncGenerator[tuple[End, End]]:
    """Yields a producer "a-0" and a consumer "b-0" that are not connected yet."""
    producer, consumer = End(name, replica="a-0"), End(name, replica="b-0")
    try:
        yield producer, consumer
    finally:
        await consumer.close()
        await producer.close()


@asynccontextmanager
async def connected(name: ConnectorName) -> AsyncGenerator[Connected]:
    """Yields a producer "a-0" and a consumer "b-0" with a reader of the producer's arena."""
    async with ends(name) as (producer, consumer):
        reader = await consumer.connect(producer)
        try:
            yield Connected(producer, consumer, reader)
        finally:
            await reader.close()


def content(size_bytes: int, seed: int) -> Bytes:
    """Returns pseudorandom bytes that are determined by the seed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
