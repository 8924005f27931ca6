"""LoRA adapters as the diffusion engine lends them to its requests."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from stagemesh.services.engines.abilities import Adapter, AdapterControl
from stagemesh.services.engines.adapters.registry import (
    AdapterRegistry,
    Entry,
    check_name,
    disabled,
    unknown_where_disabled,
)
from stagemesh.services.engines.cleanup import to_the_end
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.options import DiffusionOptions


class AdapterManager:
    """Loads, drops and lends them. All that are loaded stay on the device; a step uses one."""

    def __init__(self, executor: Executor, options: DiffusionOptions, *, stage: str) -> None:
        self._executor, self._stage = executor, stage
        self._lock = asyncio.Lock()
        most = options.max_loras
        self._book = AdapterRegistry(stage, most, most, "max_loras") if options.enable_lora else None

    def listed(self) -> Sequence[Adapter]:
        """Those that are loaded, by name."""
        return self._book.listed() if self._book else []

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncGenerator[None]:
        """For a task that names an adapter, or none: it stays loaded within the context. Raises NotFoundError."""
        if name is None:
            yield
        elif self._book is None:
            raise unknown_where_disabled(self._stage, name)
        else:
            async with self._book.using(name):
                yield

    async def load(self, name: str, path: str) -> Adapter:
        """See `AdapterControl`."""
        book = self._enabled()
        check_name(name)
        async with self._lock:
            entry = book.loaded(name, path)
            if entry is None:
                entry = await to_the_end(self._load(book, name, path))
            return entry.public

    async def unload(self, name: str, *, drain: bool) -> None:
        """See `AdapterControl`."""
        book = self._enabled()
        async with book.leaving(name, drain=drain) as entry, self._lock:
            await to_the_end(self._unload(book, entry))

    async def pin(self, name: str) -> Adapter:
        """See `AdapterControl`. Each that is loaded has its place already."""
        async with self._lock, self._enabled().pinning(name) as entry:
            entry.held = True
            return entry.public

    # -- inner workings

    def _enabled(self) -> AdapterRegistry:
        if self._book is None:
            raise disabled(self._stage)
        return self._book

    async def _load(self, book: AdapterRegistry, name: str, path: str) -> Entry:
        rank: int = await self._executor.call("load_adapter", name, path)
        entry = Entry(name, path, rank, book.number())
        book.add(entry)
        return entry

    async def _unload(self, book: AdapterRegistry, entry: Entry) -> None:
        await self._executor.call("unload_adapter", entry.name)
        book.remove(entry)


class LendsAdapters(AdapterControl):
    """An engine that lends adapters."""

    @property
    @abstractmethod
    def lending(self) -> AdapterManager:
        """Its adapters."""

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """See `AdapterControl`."""
        return await self.lending.load(name, path)

    async def unload_adapter(self, name: str, *, drain: bool) -> None:
        """See `AdapterControl`."""
        await self.lending.unload(name, drain=drain)

    async def pin_adapter(self, name: str) -> Adapter:
        """See `AdapterControl`."""
        return await self.lending.pin(name)

    def adapters(self) -> Sequence[Adapter]:
        """See `AdapterControl`."""
        return self.lending.listed()
