"""Operator controls of a diffusion engine: LoRA adapters, sleep, the prompt cache and profiles."""

import asyncio
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.adapters.manager import AdapterManager, Entry
from stagemesh.services.engines.controls import Profiles, SleepManager, private_folder
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.options import DiffusionOptions

LEVELS = (1, 2)
WEIGHTS, BUFFERS = "weights", "buffers"


class DiffusionAdapters(AdapterManager):
    """Manages a stage's LoRA adapters. All loaded adapters remain on the device, each in its own slot.

    Each denoising step uses at most one adapter.
    """

    def __init__(self, executor: Executor, options: DiffusionOptions, *, stage: str) -> None:
        limit = options.max_loras if options.enable_lora else 0
        super().__init__(stage=stage, slots=limit, capacity=limit, capacity_option="max_loras", lock=asyncio.Lock())
        self._executor = executor

    async def _engine_load(self, entry: Entry) -> int:
        rank: int = await self._executor.call("runner.adapters.load", entry.name, entry.path)
        return rank

    async def _engine_unload(self, entry: Entry) -> None:
        await self._executor.call("runner.adapters.unload", entry.name)

    async def _engine_pin(self, entry: Entry) -> None:
        """Does nothing, because every loaded adapter has its own slot and does not need to be pinned."""

    def _check_awake(self) -> None:
        """Does nothing, because the engine loads all adapters again when it wakes up."""


class WorkerControls(SleepManager):
    """Puts the engine's worker to sleep and wakes it up, and controls the worker's prompt cache.

    Implements `abilities.SleepControl` and `abilities.CacheControl`.
    """

    def __init__(
        self, executor: Executor, adapters: DiffusionAdapters, options: DiffusionOptions, *, stage: str
    ) -> None:
        super().__init__(stage=stage)
        self._executor, self._adapters = executor, adapters
        self.prompt_cache = CacheStatistics(limit_bytes=options.prompt_cache_bytes)
        """Statistics of the prompt cache, as last reported by the worker."""
        self.profiles = WorkerProfiles(executor, stage=stage, profile_dir=options.profile_dir)

    def check_sleep(self, level: int) -> None:
        if level not in LEVELS:
            raise InvalidRequestError(
                f"level is {level}; it must be 1 (frees the memory of the weights) or 2 (frees all memory)"
            )

    async def clear_caches(self, *, preempt: bool) -> None:
        # Running requests retain the embeddings that they have read, so clearing needs no preemption.
        del preempt
        self.prompt_cache = await self._executor.call("prompt_cache.clear")

    def cache_statistics(self) -> CacheStatistics:
        return self.prompt_cache

    # -- inner workings

    async def _engine_sleep(self, level: int) -> set[str]:
        await self._executor.call("sleep", level)
        return {WEIGHTS} if level == 1 else {WEIGHTS, BUFFERS}

    async def _engine_wake(self, tags: set[str]) -> None:
        # Buffers need no call, because they are allocated when they are used.
        if WEIGHTS in tags and await self._executor.call("wake"):
            for adapter in self._adapters.list_adapters():
                await self._executor.call("runner.adapters.load", adapter.name, adapter.path)


class WorkerProfiles(Profiles):
    """Profiles the workers of an executor. Each worker writes a separate file."""

    def __init__(self, executor: Executor, *, stage: str, profile_dir: str | None) -> None:
        """`profile_dir` is the folder in which profiles are written. If None, all requests for profiles are
        rejected.
        """
        private = Path(private_folder(profile_dir)) if profile_dir else Path()
        super().__init__(stage=stage, base=profile_dir, private=private)
        self._executor = executor

    async def _begin(self, prefix: str, *, max_steps: int | None) -> None:
        await self._executor.call("start_profile", str(self._private / prefix), max_steps=max_steps)

    async def _end(self) -> None:
        await self._executor.call("stop_profile")
