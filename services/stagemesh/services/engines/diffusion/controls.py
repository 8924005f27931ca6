"""Operator controls of a diffusion engine: sleep, profiling and the prompt cache. `adapters` contains the adapter
controls."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.controls import Profiles, SleepState, private_folder, run_to_completion
from stagemesh.services.engines.diffusion.adapters.manager import DiffusionAdapters
from stagemesh.services.engines.diffusion.executor import Executor

LEVELS = (1, 2)
WEIGHTS, BUFFERS = "weights", "buffers"


class SleepController:
    """Puts the engine's worker to sleep, which frees memory, and wakes the worker. Implements
    `abilities.SleepControl`."""

    def __init__(self, executor: Executor, adapters: DiffusionAdapters, *, stage: str) -> None:
        self._executor, self._adapters = executor, adapters
        self._lock = asyncio.Lock()
        self._state = SleepState(stage=stage)

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

    # -- inner workings

    async def _sleep(self, level: int) -> None:
        await self._executor.call("sleep", level)
        self._state.tags = {WEIGHTS} if level == 1 else {WEIGHTS, BUFFERS}

    async def _wake(self, tags: set[str]) -> None:
        # Buffers need no call, because they are allocated when they are used.
        if WEIGHTS in tags and await self._executor.call("wake"):
            for adapter in self._adapters.list_adapters():
                await self._executor.call("load_adapter", adapter.name, adapter.path)
        self._state.tags -= tags


class PromptCacheControl:
    """Clears the worker's prompt cache and reports its statistics. Implements `abilities.CacheControl`."""

    def __init__(self, executor: Executor, *, limit_bytes: int) -> None:
        self.statistics = CacheStatistics(limit_bytes=limit_bytes)
        """Statistics of the prompt cache, as last reported by the worker."""
        self._executor = executor

    async def clear_caches(self, *, preempt: bool) -> None:
        # Running requests retain the embeddings that they have read, so clearing needs no preemption.
        del preempt
        self.statistics = await self._executor.call("clear_prompt_cache")

    def cache_statistics(self) -> CacheStatistics:
        return self.statistics


class WorkerProfiles(Profiles):
    """Profiles the workers of an executor. Each worker writes its own file."""

    def __init__(self, executor: Executor, *, stage: str, profile_dir: str | None) -> None:
        """Creates the control. It rejects all requests for profiles if `profile_dir` is None."""
        private = Path(private_folder(profile_dir)) if profile_dir else Path()
        super().__init__(stage=stage, base=profile_dir, private=private)
        self._executor = executor

    async def _begin(self, prefix: str, *, max_steps: int | None) -> None:
        await self._executor.call("start_profile", str(self._private / prefix), max_steps=max_steps)

    async def _end(self) -> None:
        await self._executor.call("stop_profile")
