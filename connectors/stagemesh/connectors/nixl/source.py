"""A producer's arena as it is read from here: one connection, however many readers it has."""

import asyncio
from collections.abc import Iterable, Sequence

from stagemesh.connectors.arena import Account, Arena
from stagemesh.connectors.connector import ArenaRange, Bytes
from stagemesh.connectors.errors import UnavailableError
from stagemesh.connectors.memory_file import LAYOUT_NAME
from stagemesh.connectors.nixl.environment import unavailable
from stagemesh.connectors.nixl.offer import NixlOffer
from stagemesh.connectors.nixl.plan import Piece, Plan
from stagemesh.connectors.nixl.pump import Peer, Pump, Read


class Source:
    """Used on the event loop. Made for an offer; `greeting` ends when it may be read, or with why it may not."""

    def __init__(self, offer: NixlOffer, *, pump: Pump, landing: Arena) -> None:
        self.offer = offer
        self.readers = 0
        self._pump, self._landing = pump, landing
        self._account = Account()
        self._peer: Peer | None = None
        self.greeting = asyncio.create_task(self._greet())

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left, so that it may be met anew."""
        return self._peer.is_gone if self._peer else self.greeting.done()

    @property
    def failure(self) -> str:
        """Why it is not read from any more, though something of it may be under way; empty while it is."""
        return self._peer.failure if self._peer else ""

    async def fetch(self, places: Sequence[ArenaRange]) -> list[Bytes]:
        """See `FetchingReader`."""
        peer = self._peer
        if peer is None or peer.failure:
            raise UnavailableError(self.failure or f"{self.offer.agent} was not met")
        plan = Plan(places, file_bytes=self.offer.file_bytes)
        region = await self._landing.allocate(plan.size_bytes, self._account)
        steps = plan.steps(local=self._landing.address + region.offset, remote=self.offer.address)
        array = region.as_array()
        await self._read(steps, array, size_bytes=plan.data_bytes)
        return plan.views(array)

    async def leave(self) -> None:
        """One reader less; the last closes the connection."""
        self.readers -= 1
        if not self.readers and self._peer is not None:
            await self._pump.part(self._peer)

    async def _greet(self) -> None:
        await self._pump.start()
        peer = self._peer = await self._pump.meet(self.offer.agent, self.offer.metadata)
        try:
            await self._check(self.offer.token + LAYOUT_NAME)
        except BaseException as exc:
            await self._pump.part(peer)
            if isinstance(exc, UnavailableError):
                raise unavailable(exc.message) from exc
            raise

    async def _check(self, beginning: bytes) -> None:
        """Reads the file's start, which shows that this is the arena, and that it can be reached."""
        region = await self._landing.allocate(len(beginning), self._account)
        array = region.as_array()
        piece = Piece(self._landing.address + region.offset, self.offer.address, len(beginning))
        await self._read([[[piece]]], array, size_bytes=len(beginning))
        if array[: len(beginning)].tobytes() != beginning:
            raise unavailable(f"what {self.offer.agent} offers is no arena, or one of another version")

    async def _read(self, steps: Iterable[Iterable[list[Piece]]], array: Bytes, *, size_bytes: int) -> None:
        assert self._peer is not None, "nothing is read before the peer is known"
        read = Read(steps, landing=array)
        self._pump.submit(self._peer, read, size_bytes=size_bytes)
        await read.wait()
