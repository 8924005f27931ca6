"""What the diffusion engine keeps of prompts, as an operator sees it."""

from typing import TYPE_CHECKING

from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion.executor import Executor

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCacheFigures


class PromptCacheControl:
    """The worker's cache of prompt embeddings."""

    def __init__(self, executor: Executor, *, limit_bytes: int) -> None:
        self.figures: PromptCacheFigures | None = None
        """As the worker last told them; None before the first request."""
        self._executor, self._limit_bytes = executor, limit_bytes

    async def clear_caches(self, *, preempt: bool) -> None:
        """Drops all entries. Running requests keep what they have taken from the cache, so none is preempted."""
        del preempt
        self.figures = await self._executor.call("clear_prompt_cache")

    def cache_statistics(self) -> CacheStatistics:
        """See `CacheControl`."""
        figures = self.figures
        if figures is None:
            return CacheStatistics(limit_bytes=self._limit_bytes)
        return CacheStatistics(
            entries=figures.entries,
            size_bytes=figures.size_bytes,
            limit_bytes=self._limit_bytes,
            hits=figures.hits,
            misses=figures.misses,
        )
