"""LoRA adapters as the diffusion engine lends them to its requests."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from stagemesh.services.engines.abilities import Adapter
from stagemesh.services.engines.adapters.registry import (
    AdapterRegistry,
    Entry,
    check_name,
    disabled_error,
    unknown_adapter_error,
)
from stagemesh.services.engines.cleanup import run_to_completion
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.options import DiffusionOptions


class AdapterManager:
    """Loads, drops and lends them. All that are loaded stay on the device; a step uses one."""

    def __init__(self, executor: Executor, options: DiffusionOptions, *, stage: str) -> None:
        self._executor, self._stage = executor, stage
        self._lock = asyncio.Lock()
        most = options.max_loras
        self._book = AdapterRegistry(stage, most, most, "max_loras") if options.enable_lora else None

    def list_adapters(self) -> Sequence[Adapter]:
        """Those that are loaded, by name."""
        return self._book.list_adapters() if self._book else []

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncGenerator[None]:
        """For a task that names an adapter, or none: it stays loaded within the context. Raises NotFoundError."""
        if name is None:
            yield
        elif self._book is None:
            raise unknown_adapter_error(self._stage, name)
        else:
            async with self._book.using(name):
                yield

    async def load(self, name: str, path: str) -> Adapter:
        """See `AdapterControl`."""
        book = self._enabled()
        check_name(name)
        async with self._lock:
            entry = book.find_loaded(name, path)
            if entry is None:
                entry = await run_to_completion(self._load(book, name, path))
            return entry.adapter

    async def unload(self, name: str, *, drain: bool) -> None:
        """See `AdapterControl`."""
        book = self._enabled()
        async with book.unloading(name, drain=drain) as entry, self._lock:
            await run_to_completion(self._unload(book, entry))

    async def pin(self, name: str) -> Adapter:
        """See `AdapterControl`. Each that is loaded has its place already."""
        async with self._lock, self._enabled().pinning(name) as entry:
            entry.pinned = True
            return entry.adapter

    # -- inner workings

    def _enabled(self) -> AdapterRegistry:
        if self._book is None:
            raise disabled_error(self._stage)
        return self._book

    async def _load(self, book: AdapterRegistry, name: str, path: str) -> Entry:
        rank: int = await self._executor.call("load_adapter", name, path)
        entry = Entry(name, path, rank, book.next_number())
        book.add(entry)
        return entry

    async def _unload(self, book: AdapterRegistry, entry: Entry) -> None:
        await self._executor.call("unload_adapter", entry.name)
        book.remove(entry)
