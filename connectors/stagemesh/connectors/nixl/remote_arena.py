"""A producer's arena as it is read from here: one connection, however many readers it has."""

import asyncio
from collections.abc import Sequence

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.arena.arena import Arena, MemoryAccount, Region
from stagemesh.connectors.arena.memory_file import LAYOUT_NAME, data_offset_in
from stagemesh.connectors.base import ArenaRange, Bytes
from stagemesh.connectors.nixl.environment import unavailable
from stagemesh.connectors.nixl.offer import NixlOffer
from stagemesh.connectors.nixl.read_thread import ReadThread
from stagemesh.connectors.nixl.remote_reads import Read, RemoteReads
from stagemesh.connectors.nixl.transfer_plan import Transfer, TransferPlan

AT_ONCE_BYTES = 1 << 20
"""The most that is copied on the event loop itself, where it is over before a thread would have woken up."""


class RemoteArena:
    """Used on the event loop. Made for an offer; `greeting` ends when it may be read, or with why it may not."""

    def __init__(self, offer: NixlOffer, *, pump: ReadThread, landing: Arena) -> None:
        self.offer = offer
        self.readers = 0
        self._pump, self._landing = pump, landing
        self._data_offset = data_offset_in(offer.file_bytes)
        self._peer: RemoteReads | None = None
        self.greeting = asyncio.create_task(self._greet())

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left, so that it may be met anew."""
        return self._peer.is_gone if self._peer else self.greeting.done()

    @property
    def failure(self) -> str:
        """Why it is not read from any more, though something of it may be under way; empty while it is."""
        return self._peer.failure if self._peer else ""

    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """See `FetchingReader`."""
        peer = self._peer
        if peer is None or peer.failure:
            raise UnavailableError(self.failure or f"{self.offer.agent} was not met")
        plan = self._plan(places)
        region = await self._landing.allocate(plan.size_bytes, account)
        read = self._read(plan, region, peer)
        self._pump.submit(peer, read)
        await read.wait()
        return plan.views(read.landing)

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:
        """See `FetchingReader`."""
        peer = self._peer
        if peer is None or not peer.copies or sum(place.size_bytes for place in places) > AT_ONCE_BYTES:
            return None
        plan = self._plan(places)
        region = self._landing.try_allocate(plan.size_bytes, account)
        if region is None:
            return None
        read = self._read(plan, region, peer)
        return plan.views(read.landing) if self._pump.read_at_once(peer, read) else None

    async def leave(self) -> None:
        """One reader less; the last closes the connection."""
        self.readers -= 1
        if not self.readers and self._peer is not None:
            await self._pump.part(self._peer)

    def _plan(self, places: Sequence[ArenaRange]) -> TransferPlan:
        return TransferPlan(places, data_offset=self._data_offset, file_bytes=self.offer.file_bytes)

    def _read(self, plan: TransferPlan, region: Region, peer: RemoteReads) -> Read:
        """Into a region, whose hold goes over to it."""
        ours, theirs = self._landing.address + region.offset, self.offer.address
        data = plan.data(local=ours, remote=theirs, part_bytes=peer.part_bytes)
        return Read(data, plan.words(local=ours, remote=theirs), landing=region.as_array())

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

    async def _check(self, peer: RemoteReads, beginning: bytes) -> None:
        """Reads the file's start, which shows that this is the arena, and that it can be reached."""
        region = await self._landing.allocate(len(beginning), MemoryAccount())
        array = region.as_array()
        size_bytes = len(beginning)
        ours, theirs = (self._landing.address + region.offset, size_bytes, 0), (self.offer.address, size_bytes, 0)
        read = Read([Transfer([ours], [theirs], size_bytes)], [], landing=array)
        self._pump.submit(peer, read)
        await read.wait()
        if array[:size_bytes].tobytes() != beginning:
            raise unavailable(f"what {self.offer.agent} offers is no arena, or one of another version")
