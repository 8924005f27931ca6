"""A producer's arena as it is read from here: one connection, however many readers it has."""

import asyncio
from collections.abc import Sequence

from stagemesh.connectors.arena import Account, Arena
from stagemesh.connectors.connector import ArenaRange, Bytes
from stagemesh.connectors.errors import UnavailableError
from stagemesh.connectors.memory_file import LAYOUT_NAME, data_offset_in
from stagemesh.connectors.nixl.environment import unavailable
from stagemesh.connectors.nixl.offer import NixlOffer
from stagemesh.connectors.nixl.peer import Peer, Read
from stagemesh.connectors.nixl.plan import Plan, Transfer
from stagemesh.connectors.nixl.pump import Pump


class Source:
    """Used on the event loop. Made for an offer; `greeting` ends when it may be read, or with why it may not."""

    def __init__(self, offer: NixlOffer, *, pump: Pump, landing: Arena) -> None:
        self.offer = offer
        self.readers = 0
        self._pump, self._landing = pump, landing
        self._data_offset = data_offset_in(offer.file_bytes)
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

    async def fetch(self, places: Sequence[ArenaRange], account: Account) -> list[Bytes]:
        """See `FetchingReader`."""
        peer = self._peer
        if peer is None or peer.failure:
            raise UnavailableError(self.failure or f"{self.offer.agent} was not met")
        plan = Plan(places, data_offset=self._data_offset, file_bytes=self.offer.file_bytes)
        landing = self._landing
        region = landing.try_allocate(plan.size_bytes, account) or await landing.allocate(plan.size_bytes, account)
        ours, theirs = landing.address + region.offset, self.offer.address
        array = region.as_array()
        data = plan.data(local=ours, remote=theirs, part_bytes=peer.part_bytes)
        read = Read(data, plan.words(local=ours, remote=theirs), landing=array)
        self._pump.submit(peer, read, size_bytes=plan.data_bytes)
        await read.wait()
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
            await self._check(peer, self.offer.token + LAYOUT_NAME)
        except BaseException as exc:
            await self._pump.part(peer)
            if isinstance(exc, UnavailableError):
                raise unavailable(exc.message) from exc
            raise

    async def _check(self, peer: Peer, beginning: bytes) -> None:
        """Reads the file's start, which shows that this is the arena, and that it can be reached."""
        region = await self._landing.allocate(len(beginning), Account())
        array = region.as_array()
        size_bytes = len(beginning)
        ours, theirs = (self._landing.address + region.offset, size_bytes, 0), (self.offer.address, size_bytes, 0)
        read = Read([Transfer([ours], [theirs], size_bytes)], [], landing=array)
        self._pump.submit(peer, read, size_bytes=size_bytes)
        await read.wait()
        if array[:size_bytes].tobytes() != beginning:
            raise unavailable(f"what {self.offer.agent} offers is no arena, or one of another version")
