"""The nixl connector. The producer's serving agent answers READs, and the consumer's reading agent issues READs.

A serving agent must answer at any time, because over TCP the target of a READ participates in the transfer. Therefore
the library runs a progress thread for this agent. The thread sleeps until a READ arrives. A reading agent does not have
a progress thread. Only `ReadThread` and, for small reads, the event loop use a reading agent.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from stagemesh.common.connector_descriptors import NIXL, ConnectorName
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, FetchingReader, MemoryAccount, Producer
from stagemesh.connectors.nixl.environment import quiet, shared_settings, unavailable
from stagemesh.connectors.nixl.read_thread import ReadThread
from stagemesh.connectors.nixl.remote_arena import NixlOffer, RemoteArena

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent


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
        handshakes = [arena.handshake for arena in self._arenas.values()]
        for handshake in handshakes:
            # The read thread may still be blocked in the library by a handshake with a host that does not answer.
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)
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
    quiet()
    try:
        from stagemesh.connectors.nixl.agent import Agent
    except ImportError as exc:
        raise unavailable(f"nixl cannot be loaded ({exc}); run: pip install 'stagemesh[nixl]'") from exc
    return Agent(name, arena, serves=serves)
