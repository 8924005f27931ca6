"""The arena of one producer: the producer's offer, and the connection that all of this replica's readers share."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.arena.arena import Arena, Region
from stagemesh.connectors.arena.memory_file import LAYOUT_NAME, TOKEN_BYTES, data_offset_in
from stagemesh.connectors.base import ArenaRange, Bytes, MemoryAccount
from stagemesh.connectors.nixl.environment import unavailable
from stagemesh.connectors.nixl.read_thread import ReadThread
from stagemesh.connectors.nixl.remote_reads import Read, RemoteReads
from stagemesh.connectors.nixl.transfer_plan import Transfer, TransferPlan

_FORMAT = b"nixl2\0"
_DIGEST_BYTES = 16
_BODY_AT = len(_FORMAT) + _DIGEST_BYTES
_ADDRESS_SPACE_BYTES = 1 << 64
AT_ONCE_BYTES = 1 << 20
"""The maximum number of bytes that are read on the event loop. Waking the read thread would take longer."""


@dataclass(frozen=True)
class NixlOffer:
    """Describes an arena's agent and memory. Raises ValueError if the numbers cannot describe an arena."""

    agent: str
    """The serving agent's name, which consists of replica, incarnation and a random part."""
    metadata: bytes
    """The agent's metadata, which only the library interprets."""
    address: int
    """The address of the arena file's first byte in the producer's process."""
    file_bytes: int
    token: bytes
    """The bytes at the start of the arena file, which the reader verifies."""
    settings: str
    """The producer's library settings, which must equal the reader's settings."""

    def __post_init__(self) -> None:
        data_offset_in(self.file_bytes)
        if not 0 <= self.address < _ADDRESS_SPACE_BYTES - self.file_bytes:
            raise ValueError(f"an arena of {self.file_bytes} bytes at {self.address:#x} exceeds the address space")
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"its token has {len(self.token)} bytes, not {TOKEN_BYTES}")

    def pack(self) -> bytes:
        """Returns the serialized offer, including a format version and a digest."""
        body = msgspec.msgpack.encode(self)
        return _FORMAT + _digest(body) + body

    @classmethod
    def parse(cls, data: bytes) -> "NixlOffer":
        """Returns the offer in `data`. Raises ValueError if `data` is not a valid offer of this version."""
        body = data[_BODY_AT:]
        if not data.startswith(_FORMAT):
            raise ValueError("the offer has another format or version")
        if data[len(_FORMAT) : _BODY_AT] != _digest(body):
            # The library does not check the metadata, and crashes if the metadata is damaged.
            raise ValueError("the offer was damaged in transit")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as exc:
            raise ValueError(str(exc)) from exc


class RemoteArena:
    """Connects to the arena that an offer describes, and reads it. Use it only on the event loop.

    The task `handshake` ends when the arena can be read. It raises an error if the arena cannot be read.
    """

    def __init__(self, offer: NixlOffer, *, read_thread: ReadThread, landing: Arena) -> None:
        self.offer = offer
        self.readers = 0
        self._read_thread, self._landing = read_thread, landing
        self._data_offset = data_offset_in(offer.file_bytes)
        self._peer: RemoteReads | None = None
        self.handshake = asyncio.create_task(self._shake_hands())

    @property
    def is_removed(self) -> bool:
        """Whether the connection and all its transfers have ended, so that a new connection is possible."""
        return self._peer.is_removed if self._peer else self.handshake.done()

    @property
    def failure(self) -> str:
        """The reason why the arena can no longer be read. Empty if the connection has not failed.

        After a failure, transfers may still be in flight.
        """
        return self._peer.failure if self._peer else ""

    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """Reads ranges in the read thread and returns copies of them. Implements `FetchingReader.fetch`."""
        peer = self._peer
        if peer is None or peer.failure:
            raise UnavailableError(self.failure or f"{self.offer.agent} is not connected")
        plan = self._plan(places)
        region = await self._landing.allocate(plan.size_bytes, account)
        read = self._read(plan, region, peer)
        await self._read_thread.run(peer, read)
        return plan.views(read.landing)

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:
        """Reads small ranges on the event loop and returns copies of them. Implements `FetchingReader.fetch_at_once`.

        Returns None if the ranges cannot be read immediately.
        """
        peer = self._peer
        if peer is None or not peer.copies or sum(place.size_bytes for place in places) > AT_ONCE_BYTES:
            return None
        plan = self._plan(places)
        region = self._landing.try_allocate(plan.size_bytes, account)
        if region is None:
            return None
        read = self._read(plan, region, peer)
        return plan.views(read.landing) if self._read_thread.read_at_once(peer, read) else None

    async def leave(self) -> None:
        """Removes one reader of the connection. Closes the connection if no reader remains."""
        self.readers -= 1
        if not self.readers and self._peer is not None:
            await self._read_thread.disconnect(self._peer)

    def _plan(self, places: Sequence[ArenaRange]) -> TransferPlan:
        return TransferPlan(places, data_offset=self._data_offset, file_bytes=self.offer.file_bytes)

    def _read(self, plan: TransferPlan, region: Region, peer: RemoteReads) -> Read:
        """Returns a new read into a region. The read takes over the caller's reference to the region."""
        ours, theirs = self._landing.address + region.offset, self.offer.address
        data = plan.data_transfers(local=ours, remote=theirs, transfer_bytes=peer.transfer_bytes)
        return Read(data, plan.generation_transfers(local=ours, remote=theirs), region.as_array())

    async def _shake_hands(self) -> None:
        peer = self._peer = await self._read_thread.connect(self.offer.agent, self.offer.metadata)
        try:
            await self._check(peer, self.offer.token + LAYOUT_NAME)
        except BaseException as exc:
            await self._read_thread.disconnect(peer)
            if isinstance(exc, UnavailableError):
                raise unavailable(exc.message) from exc
            raise

    async def _check(self, peer: RemoteReads, beginning: bytes) -> None:
        """Reads the start of the arena to verify that the arena is reachable and belongs to the offer.

        Raises NotReadyError if the start differs from `beginning`, and UnavailableError if the read fails.
        """
        region = await self._landing.allocate(len(beginning), MemoryAccount())
        array = region.as_array()
        size_bytes = len(beginning)
        ours, theirs = (self._landing.address + region.offset, size_bytes, 0), (self.offer.address, size_bytes, 0)
        read = Read([Transfer([ours], [theirs], size_bytes)], [], array)
        await self._read_thread.run(peer, read)
        if array[:size_bytes].tobytes() != beginning:
            raise unavailable(f"the memory that {self.offer.agent} offers is not an arena of this version")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
