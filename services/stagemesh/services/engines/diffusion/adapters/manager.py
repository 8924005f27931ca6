"""Manages the LoRA adapters of a diffusion engine. Adapters can be loaded and unloaded while requests run."""

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
    """Manages a stage's LoRA adapters. Implements `abilities.AdapterControl`.

    All loaded adapters stay on the device. Each denoising step uses at most one adapter.
    """

    def __init__(self, executor: Executor, options: DiffusionOptions, *, stage: str) -> None:
        self._executor, self._stage = executor, stage
        self._lock = asyncio.Lock()
        limit = options.max_loras
        self._registry = AdapterRegistry(stage, limit, limit, "max_loras") if options.enable_lora else None

    def list_adapters(self) -> Sequence[Adapter]:
        return self._registry.list_adapters() if self._registry else []

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncGenerator[None]:
        """Prevents the adapter `name` from being unloaded within the context. Does nothing if `name` is None.

        Raises NotFoundError if the adapter is not loaded.
        """
        if name is None:
            yield
        elif self._registry is None:
            raise unknown_adapter_error(self._stage, name)
        else:
            async with self._registry.using(name):
                yield

    async def load(self, name: str, path: str) -> Adapter:
        registry = self._enabled()
        check_name(name)
        async with self._lock:
            entry = registry.find_loaded(name, path)
            if entry is None:
                entry = await run_to_completion(self._load(registry, name, path))
            return entry.adapter

    async def unload(self, name: str, *, drain: bool) -> None:
        registry = self._enabled()
        async with registry.unloading(name, drain=drain) as entry, self._lock:
            await run_to_completion(self._unload(registry, entry))

    async def pin(self, name: str) -> Adapter:
        # Every loaded adapter already has its own slot.
        async with self._lock, self._enabled().pinning(name) as entry:
            entry.pinned = True
            return entry.adapter

    # -- inner workings

    def _enabled(self) -> AdapterRegistry:
        if self._registry is None:
            raise disabled_error(self._stage)
        return self._registry

    async def _load(self, registry: AdapterRegistry, name: str, path: str) -> Entry:
        rank: int = await self._executor.call("load_adapter", name, path)
        entry = Entry(name, path, rank, registry.next_number())
        registry.add(entry)
        return entry

    async def _unload(self, registry: AdapterRegistry, entry: Entry) -> None:
        await self._executor.call("unload_adapter", entry.name)
        registry.remove(entry)
