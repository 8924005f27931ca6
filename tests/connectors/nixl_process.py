"""A process with a nixl connector, controlled as `replica_process` is.

Written bytes follow from a seed. The reader can therefore check them.
"""

import argparse
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from stagemesh.conformance.replicas import content
from stagemesh.connectors.arena.arena import Arena, Written
from stagemesh.connectors.base import ArenaRange, Bytes, FetchingReader, MemoryAccount, Producer
from stagemesh.connectors.nixl.connector import NixlConnector
from stagemesh.connectors.nixl.environment import bind_to
from tests.connectors.replica_process import main
from tests.connectors.replicas import Replica, replica

INCARNATION = "1"


class NixlProgram:
    """Both sides of a connector. Every method is a command."""

    def __init__(self, name: str, *, arena_bytes: int, landing_bytes: int, listen: str = "") -> None:
        if listen:
            bind_to(listen)
        self._arena = Arena(arena_bytes)
        landing = Arena(landing_bytes)

        async def make_landing() -> Arena:
            return landing

        self._landing = landing
        self._connector = NixlConnector(self._arena, landing=make_landing, replica=name, incarnation=INCARNATION)
        self._readers: dict[str, FetchingReader] = {}
        self._written: list[Written] = []
        self._kept: list[list[Bytes]] = []

    async def offer(self) -> str:
        return (await self._connector.offer()).hex()

    async def write(self, sizes: Sequence[int], seed: int) -> list[list[int]]:
        tensors = {str(number): content(size, seed + number) for number, size in enumerate(sizes)}
        written = await self._arena.write(tensors, MemoryAccount())
        self._written.append(written)
        return [list(place) for place in written.places]

    async def connect(self, offer: str, replica: str) -> None:
        reader = await self._connector.connect(bytes.fromhex(offer), Producer(replica, INCARNATION, None))
        assert isinstance(reader, FetchingReader)
        self._readers[replica] = reader

    async def fetch(self, replica: str, places: list[list[int]], seed: int, *, keep: bool = False) -> bool:
        views = await self._readers[replica].fetch([ArenaRange(*place) for place in places], MemoryAccount())
        if keep:
            self._kept.append(views)
        wanted = (content(place[1], seed + number) for number, place in enumerate(places))
        return all(np.array_equal(view, want) for view, want in zip(views, wanted, strict=True))

    async def drop(self) -> None:
        self._kept.clear()

    async def leave(self, replica: str) -> None:
        await self._readers.pop(replica).close()

    async def close(self) -> None:
        await self._connector.close()

    async def landing_bytes(self) -> int:
        return self._landing.used_bytes


@asynccontextmanager
async def nixl_process(
    name: str,
    *,
    within: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arena_bytes: int = 64 << 20,
    landing_bytes: int = 64 << 20,
    listen: str = "",
) -> AsyncIterator[Replica]:
    """Runs a process, through the command `within` if it is given.

    It is confined to the interface of the address `listen`, if there is one.
    """
    limits: dict[str, int | str] = {"arena_bytes": arena_bytes, "landing_bytes": landing_bytes, "listen": listen}
    async with replica(name, module=__name__, within=within, environment=environment, limits=limits) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def _connector(options: argparse.Namespace) -> AsyncIterator[tuple[NixlProgram, str]]:
    yield NixlProgram(options.replica, **options.limits), ""


if __name__ == "__main__":
    main(_connector)
