"""The nixl connector: its offer, and the connection to a producer that all readers share.

The producer's serving agent answers READs, and the consumer's reading agent issues READs.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import NIXL, ConnectorName
from stagemesh.common.tasks import end_tasks
from stagemesh.connectors.arena.arena import Arena, Region
from stagemesh.connectors.arena.memory import LAYOUT_NAME, TOKEN_BYTES, data_offset_in
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, FetchingReader, MemoryAccount, Producer, unavailable
from stagemesh.connectors.nixl.environment import prepare, shared_settings
from stagemesh.connectors.nixl.read_thread import ReadThread
from stagemesh.connectors.nixl.reads import Read, RemoteReads, Transfer, TransferPlan
from stagemesh.rpc.credentials import PROCESS

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent


_FORMAT = b"nixl2\0"
_DIGEST_BYTES = 16
_BODY_AT = len(_FORMAT) + _DIGEST_BYTES
_ADDRESS_SPACE_BYTES = 1 << 64
AT_ONCE_BYTES = 1 << 20
"""The maximum size in bytes of a read that runs on the event loop.

For such a small read, waking the read thread would take longer than the read itself.
"""


@dataclass(frozen=True)
class NixlOffer:
    """A producer's offer: the agent that serves the arena, and the arena's location in memory.

    Raises ValueError if the address, the file size or the token is invalid.
    """

    agent: str
    """The serving agent's name. The parts are replica, incarnation and a random suffix, separated by slashes."""
    metadata: bytes
    """The serving agent's metadata in the format of the nixl library."""
    address: int
    """The address of the arena file's first byte in the producer's process."""
    file_bytes: int
    token: bytes
    """The random bytes at the start of the arena file.

    The consumer reads these bytes to verify that the address belongs to the arena.
    """
    settings: str
    """The producer's UCX settings. The consumer must have the same settings."""

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
    """A connection to the arena that an offer describes. Use the connection only on the event loop.

    The task `handshake` ends when the arena can be read. The task raises an error if the arena cannot be read.
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
        """Reads ranges of the arena on the read thread and returns copies of the ranges.

        Implements `FetchingReader.fetch`.
        """
        peer = self._peer
        if peer is None or peer.failure:
            raise UnavailableError(self.failure or f"{self.offer.agent} is not connected", reason="CONNECTOR_FAILED")
        plan = self._plan(places)
        region = await self._landing.allocate(plan.size_bytes, account)
        read = self._read(plan, region, peer)
        await self._read_thread.run(peer, read)
        return plan.views(read.take_landing())

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:
        """Reads small ranges on the event loop and returns copies of the ranges.

        Returns None if the ranges cannot be read immediately. Implements `FetchingReader.fetch_at_once`.
        """
        peer = self._peer
        if peer is None or not peer.copies or sum(place.size_bytes for place in places) > AT_ONCE_BYTES:
            return None
        plan = self._plan(places)
        region = self._landing.try_allocate(plan.size_bytes, account)
        if region is None:
            return None
        read = self._read(plan, region, peer)
        return plan.views(read.take_landing()) if self._read_thread.read_at_once(peer, read) else None

    async def leave(self) -> None:
        """Removes one reader of the connection. Closes the connection if no reader remains."""
        self.readers -= 1
        if not self.readers and self._peer is not None:
            await self._read_thread.disconnect(self._peer)

    def _plan(self, places: Sequence[ArenaRange]) -> TransferPlan:
        return TransferPlan(places, data_offset=self._data_offset, file_bytes=self.offer.file_bytes)

    def _read(self, plan: TransferPlan, region: Region, peer: RemoteReads) -> Read:
        """Creates the read of `plan` into `region`. The read takes over the caller's reference to the region."""
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

        Raises NotReadyError if the bytes at the start differ from `beginning`, and UnavailableError if the read fails.
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


class NixlConnector(Connector):
    """A connector that reads arenas through the nixl library. The library is loaded when it is first needed."""

    name: ClassVar[ConnectorName] = NIXL

    def __init__(
        self, arena: Arena, *, landing: Callable[[], Awaitable[Arena]], replica: str, incarnation: str
    ) -> None:
        self._arena, self._make_landing = arena, landing
        # The random suffix keeps the name unique if a process closes its connector and creates another connector.
        self._name = f"{replica}/{incarnation}/{secrets.token_hex(4)}"
        self._serving: asyncio.Future[Agent] | None = None
        self._read_thread: ReadThread | None = None
        self._arenas: dict[str, RemoteArena] = {}
        self._is_closed = False

    async def offer(self) -> bytes:
        self._check_open()
        if self._serving is None or (self._serving.done() and self._serving.exception()):
            self._serving = asyncio.ensure_future(asyncio.to_thread(_make_agent, self._name, self._arena, serves=True))
        agent = await asyncio.shield(self._serving)
        arena = self._arena
        return NixlOffer(
            agent=agent.name,
            metadata=agent.metadata,
            address=arena.address,
            file_bytes=arena.file_bytes,
            token=arena.token,
            settings=shared_settings(),
        ).pack()

    async def connect(self, offer: bytes, producer: Producer) -> "NixlReader":
        self._check_open()
        try:
            parsed = NixlOffer.parse(offer)
        except ValueError as exc:
            raise unavailable(f"the offer of {producer.replica} cannot be used: {exc}") from exc
        if not parsed.agent.startswith(f"{producer.replica}/{producer.incarnation}/"):
            raise unavailable(f"{producer.replica} offers the memory of another replica, {parsed.agent}")
        if parsed.settings != shared_settings():
            raise unavailable(
                f"{producer.replica} has {parsed.settings}, this replica {shared_settings()}: set the same"
            )
        arena = await self._remote_arena(parsed)
        arena.readers += 1
        try:
            await asyncio.shield(arena.handshake)
        except BaseException:
            await arena.leave()
            raise
        return NixlReader(arena)

    async def close(self) -> None:
        self._is_closed = True
        if self._read_thread is not None:
            await self._read_thread.close()
        # The read thread may still be blocked in the library by a handshake with a host that does not answer.
        await end_tasks(arena.handshake for arena in self._arenas.values())
        self._arenas.clear()
        serving, self._serving = self._serving, None
        if serving is not None:
            try:
                agent = await serving
            except StagemeshError:
                return
            await asyncio.to_thread(agent.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise unavailable("this replica is stopping")

    async def _remote_arena(self, offer: NixlOffer) -> RemoteArena:
        """Returns the connection to the arena that an offer describes. Creates the connection if it does not exist.

        Raises NotReadyError if the offer differs from the offer of the existing connection, or if that connection has
        failed.
        """
        landing = await self._make_landing()
        self._check_open()
        self._arenas = {name: arena for name, arena in self._arenas.items() if not arena.is_removed}
        arena = self._arenas.get(offer.agent)
        if arena is None:
            if self._read_thread is None:
                self._read_thread = ReadThread(lambda: _make_agent(f"{self._name}/reads", landing, serves=False))
            arena = self._arenas[offer.agent] = RemoteArena(offer, read_thread=self._read_thread, landing=landing)
        elif arena.offer != offer:
            raise unavailable(f"{offer.agent} offers other memory than before")
        elif arena.failure:
            raise unavailable(f"earlier reads from {offer.agent} have not ended yet: {arena.failure}")
        return arena


class NixlReader(FetchingReader):
    """Reads a producer's arena through the nixl library. Several readers of an arena share one connection."""

    def __init__(self, arena: RemoteArena) -> None:
        self._arena: RemoteArena | None = arena

    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        if self._arena is None:
            raise UnavailableError("this reader is closed", reason="CONNECTOR_FAILED")
        return await self._arena.fetch(places, account)

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:
        # Within one host, a read is a copy and can complete immediately.
        return self._arena.fetch_at_once(places, account) if self._arena is not None else None

    async def close(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            await arena.leave()


def _make_agent(name: str, arena: Arena, *, serves: bool) -> "Agent":
    prepare(permits_tcp=PROCESS.permits_plain_tcp)
    try:
        from stagemesh.connectors.nixl.agent import Agent
    except ImportError as exc:
        raise unavailable(f"nixl cannot be loaded ({exc}); run: pip install 'stagemesh[nixl]'") from exc
    return Agent(name, arena, serves=serves)
