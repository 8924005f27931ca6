"""Operator controls of a diffusion engine: sleep, profiling and the prompt cache. `adapters` contains the adapter
controls."""

from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.controls import Profiles, SleepManager, private_folder
from stagemesh.services.engines.diffusion.adapters.manager import DiffusionAdapters
from stagemesh.services.engines.diffusion.executor import Executor

LEVELS = (1, 2)
WEIGHTS, BUFFERS = "weights", "buffers"


class SleepController(SleepManager):
    """Puts the engine's worker to sleep, which frees memory, and wakes the worker."""

    def __init__(self, executor: Executor, adapters: DiffusionAdapters, *, stage: str) -> None:
        super().__init__(stage=stage)
        self._executor, self._adapters = executor, adapters

    def check_sleep(self, level: int) -> None:
        if level not in LEVELS:
            raise InvalidRequestError(
                f"level is {level}; it must be 1 (frees the memory of the weights) or 2 (frees all memory)"
            )

    # -- inner workings

    async def _engine_sleep(self, level: int) -> set[str]:
        await self._executor.call("sleep", level)
        return {WEIGHTS} if level == 1 else {WEIGHTS, BUFFERS}

    async def _engine_wake(self, tags: set[str]) -> None:
        # Buffers need no call, because they are allocated when they are used.
        if WEIGHTS in tags and await self._executor.call("wake"):
            for adapter in self._adapters.list_adapters():
                await self._executor.call("load_adapter", adapter.name, adapter.path)


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
