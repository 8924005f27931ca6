"""Operator controls of a diffusion engine: LoRA adapters, sleep, the prompt cache and profiles."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.abilities import Adapter, CacheStatistics
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
from stagemesh.services.engines.profiles import Profiles, private_folder
from stagemesh.services.engines.sleep import SleepState

LEVELS = (1, 2)
WEIGHTS, BUFFERS = "weights", "buffers"


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
        rank: int = await self._executor.call("runner.adapters.load", name, path)
        entry = Entry(name, path, rank, registry.next_number())
        registry.add(entry)
        return entry

    async def _unload(self, registry: AdapterRegistry, entry: Entry) -> None:
        await self._executor.call("runner.adapters.unload", entry.name)
        registry.remove(entry)


class WorkerControls:
    """Controls the engine's worker. Implements `abilities.SleepControl`, `abilities.CacheControl` and
    `profiles.Recorder`."""

    def __init__(self, executor: Executor, adapters: AdapterManager, options: DiffusionOptions, *, stage: str) -> None:
        self._executor, self._adapters = executor, adapters
        self._lock = asyncio.Lock()
        self._state = SleepState(stage=stage)
        self.prompt_cache = CacheStatistics(limit_bytes=options.prompt_cache_bytes)
        """Statistics of the prompt cache, as last reported by the worker."""
        base = options.profile_dir
        self._profile_folder = Path(private_folder(base)) if base is not None else Path()
        self.profiles = Profiles(self, stage=stage, base=base, private=self._profile_folder)

    def check_sleep(self, level: int) -> None:
        if level not in LEVELS:
            raise InvalidRequestError(
                f"level is {level}; it must be 1 (frees the memory of the weights) or 2 (frees all memory)"
            )

    def check_awake(self) -> None:
        """Raises NotReadyError unless the engine is completely awake."""
        self._state.check_awake()

    def asleep(self) -> Sequence[str]:
        return self._state.asleep()

    async def sleep(self, level: int) -> None:
        self.check_sleep(level)
        async with self._lock:
            self._state.check_awake()
            await run_to_completion(self._sleep(level))

    async def wake(self, tags: Sequence[str]) -> None:
        async with self._lock:
            await run_to_completion(self._wake(self._state.select(tags)))

    async def clear_caches(self, *, preempt: bool) -> None:
        # Running requests retain the embeddings that they have read, so clearing needs no preemption.
        del preempt
        self.prompt_cache = await self._executor.call("prompt_cache.clear")

    def cache_statistics(self) -> CacheStatistics:
        return self.prompt_cache

    async def begin(self, prefix: str, *, max_steps: int | None) -> None:
        # Each worker process writes its own file.
        await self._executor.call("start_profile", str(self._profile_folder / prefix), max_steps=max_steps)

    async def end(self) -> None:
        await self._executor.call("stop_profile")

    # -- inner workings

    async def _sleep(self, level: int) -> None:
        await self._executor.call("sleep", level)
        self._state.tags = {WEIGHTS} if level == 1 else {WEIGHTS, BUFFERS}

    async def _wake(self, tags: set[str]) -> None:
        # Buffers need no call, because they are allocated when they are used.
        if WEIGHTS in tags and await self._executor.call("wake"):
            for adapter in self._adapters.list_adapters():
                await self._executor.call("runner.adapters.load", adapter.name, adapter.path)
        self._state.tags -= tags
