"""Both ends of one connector without flows between them: what the seam itself promises is tested here."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.connectors.arena.arena import Arena, MemoryAccount, Written
from stagemesh.connectors.base import (
    ArenaRange,
    Bytes,
    Connector,
    FetchingReader,
    InPlaceReader,
    Producer,
    Reader,
)
from stagemesh.connectors.conformance.replicas import emptied
from stagemesh.connectors.replica_connectors import ReplicaConnectors

ARENA_BYTES = 8 << 20


class End:
    """One replica's arenas and its connector."""

    def __init__(self, name: ConnectorName, *, replica: str, incarnation: str = "1") -> None:
        self.replica, self.incarnation = replica, incarnation
        self.arena = Arena(ARENA_BYTES)
        self._landing: Arena | None = None
        self._connectors = ReplicaConnectors(
            self.arena, landing=self._landing_arena, replica=replica, incarnation=incarnation
        )
        self.connector: Connector = self._connectors.get(name)

    async def settled(self) -> None:
        """Returns when nothing is left in the memory that is fetched into; TimeoutError where something is."""
        landing = self._landing
        if landing is not None:
            await emptied(lambda: landing.used_bytes)

    async def write(self, content: Bytes) -> tuple[Written, ArenaRange]:
        """Bytes in the arena, and where they lie."""
        written = await self.arena.write({"x": content}, MemoryAccount())
        return written, ArenaRange(written.region.offset, content.nbytes, written.region.generation)

    def as_producer(self, *, with_arena: bool = True) -> Producer:
        """How this replica introduces itself to one on its host."""
        return Producer(self.replica, self.incarnation, self.arena.fd if with_arena else None)

    async def meet(self, producer: "End") -> Reader:
        """A reader of another's arena."""
        return await self.connector.meet(await producer.connector.offer(), producer.as_producer())

    async def close(self) -> None:
        """Closes connector and arenas. Closing twice is harmless."""
        await self._connectors.close()
        self.arena.close()
        if self._landing is not None:
            self._landing.close()

    async def _landing_arena(self) -> Arena:
        if self._landing is None:
            self._landing = Arena(ARENA_BYTES)
        return self._landing


@dataclass(frozen=True)
class Met:
    """A consumer that reads from a producer."""

    producer: End
    consumer: End
    reader: Reader

    async def read(self, *places: ArenaRange) -> list[Bytes]:
        """The ranges, by whichever way the reader reads."""
        return await read(self.reader, places)


async def read(reader: Reader, places: Sequence[ArenaRange]) -> list[Bytes]:
    """What a reader finds at `places`."""
    if isinstance(reader, InPlaceReader):
        return [reader.view(place) for place in places]
    assert isinstance(reader, FetchingReader), "a reader looks or fetches"
    return await reader.fetch(places, MemoryAccount())


@asynccontextmanager
async def ends(name: ConnectorName) -> AsyncGenerator[tuple[End, End]]:
    """A producer "a-0" and a consumer "b-0" that do not know each other yet."""
    producer, consumer = End(name, replica="a-0"), End(name, replica="b-0")
    try:
        yield producer, consumer
    finally:
        await consumer.close()
        await producer.close()


@asynccontextmanager
async def met(name: ConnectorName) -> AsyncGenerator[Met]:
    """The two once the consumer can read."""
    async with ends(name) as (producer, consumer):
        reader = await consumer.meet(producer)
        try:
            yield Met(producer, consumer, reader)
        finally:
            await reader.close()


def content(size_bytes: int, seed: int) -> Bytes:
    """Bytes that follow from the seed and are different everywhere."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
