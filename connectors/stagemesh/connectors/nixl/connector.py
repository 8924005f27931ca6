"""The nixl connector's two roles: a producer is read from by its serving agent, a consumer reads by its reading agent.

The agents are two, for they want the opposite: a serving one must answer whenever a reader comes (over tcp the target
of a READ works for it), so it has a thread of the library's that sleeps until then; a reading one is driven by `pump`.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from stagemesh.common.connector_descriptors import NIXL, ConnectorName
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.connectors.arena.arena import Arena, MemoryAccount
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, FetchingReader, Producer
from stagemesh.connectors.nixl.environment import quiet, shared_settings, unavailable
from stagemesh.connectors.nixl.offer import NixlOffer
from stagemesh.connectors.nixl.read_thread import ReadThread
from stagemesh.connectors.nixl.remote_arena import RemoteArena
from stagemesh.connectors.nixl.transfer_plan import Memory

if TYPE_CHECKING:
    from stagemesh.connectors.nixl.agent import Agent


class NixlConnector(Connector):
    """Reads arenas through the nixl library, which is loaded when it is first needed."""

    name: ClassVar[ConnectorName] = NIXL

    def __init__(
        self, arena: Arena, *, landing: Callable[[], Awaitable[Arena]], replica: str, incarnation: str
    ) -> None:
        self._arena, self._make_landing = arena, landing
        # Used once, also where one process closes its connector and makes another.
        self._name = f"{replica}/{incarnation}/{secrets.token_hex(4)}"
        self._serving: asyncio.Future[Agent] | None = None
        self._pump: ReadThread | None = None
        self._sources: dict[str, RemoteArena] = {}
        self._is_closed = False

    async def offer(self) -> bytes:
        """See `Connector`."""
        self._check_open()
        if self._serving is None or (self._serving.done() and self._serving.exception()):
            self._serving = asyncio.ensure_future(asyncio.to_thread(self._serve))
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

    async def meet(self, offer: bytes, producer: Producer) -> "NixlReader":
        """See `Connector`."""
        self._check_open()
        try:
            parsed = NixlOffer.parse(offer)
        except ValueError as exc:
            raise unavailable(f"what {producer.replica} offers cannot be used: {exc}") from exc
        if not parsed.agent.startswith(f"{producer.replica}/{producer.incarnation}/"):
            raise unavailable(f"{producer.replica} offers the memory of somebody else, {parsed.agent}")
        if parsed.settings != shared_settings():
            raise unavailable(
                f"{producer.replica} has {parsed.settings}, this replica {shared_settings()}: set the same"
            )
        source = await self._source(parsed)
        source.readers += 1
        try:
            await asyncio.shield(source.greeting)
        except BaseException:
            await source.leave()
            raise
        return NixlReader(source)

    async def close(self) -> None:
        """See `Connector`. A peer can no longer read; the arena's memory stays as it is."""
        self._is_closed = True
        if self._pump is not None:
            await self._pump.close()
        await asyncio.gather(*(source.greeting for source in self._sources.values()), return_exceptions=True)
        self._sources.clear()
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

    def _serve(self) -> "Agent":
        return _make_agent(self._name, self._arena, serves=True)

    async def _source(self, offer: NixlOffer) -> RemoteArena:
        """The source of an offer: the one that is read already, or a new one."""
        landing = await self._make_landing()
        self._check_open()
        self._sources = {name: source for name, source in self._sources.items() if not source.is_gone}
        source = self._sources.get(offer.agent)
        if source is None:
            self._pump = self._pump or ReadThread(lambda: _make_agent(f"{self._name}/reads", landing, serves=False))
            source = self._sources[offer.agent] = RemoteArena(offer, pump=self._pump, landing=landing)
        elif source.offer != offer:
            raise unavailable(f"{offer.agent} offers other memory than before")
        elif source.failure:
            raise unavailable(f"earlier reads from {offer.agent} are not over yet: {source.failure}")
        return source


class NixlReader(FetchingReader):
    """One reader of a producer's arena."""

    def __init__(self, source: RemoteArena) -> None:
        self._source: RemoteArena | None = source

    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """See `FetchingReader`."""
        if self._source is None:
            raise UnavailableError("this reader is closed")
        return await self._source.fetch(places, account)

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:
        """See `FetchingReader`: on one host a read is a copy."""
        return self._source.fetch_at_once(places, account) if self._source is not None else None

    async def close(self) -> None:
        """See `Reader`."""
        source, self._source = self._source, None
        if source is not None:
            await source.leave()


def _make_agent(name: str, arena: Arena, *, serves: bool) -> "Agent":
    quiet()
    try:
        from stagemesh.connectors.nixl.agent import Agent
    except ImportError as exc:
        raise unavailable(f"nixl cannot be loaded ({exc}); install the extra: pip install stagemesh[nixl]") from exc
    return Agent(name, Memory(arena.address, arena.file_bytes), serves=serves)
