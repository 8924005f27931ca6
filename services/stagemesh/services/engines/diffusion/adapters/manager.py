"""Manages the LoRA adapters of a diffusion engine. Adapters can be loaded and unloaded while requests run."""

import asyncio

from stagemesh.services.engines.adapters.manager import AdapterManager, Entry
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.diffusion.options import DiffusionOptions


class DiffusionAdapters(AdapterManager):
    """Manages a stage's LoRA adapters. All loaded adapters stay on the device, each in its own slot.

    Each denoising step uses at most one adapter.
    """

    def __init__(self, executor: Executor, options: DiffusionOptions, *, stage: str) -> None:
        limit = options.max_loras if options.enable_lora else 0
        super().__init__(stage=stage, slots=limit, capacity=limit, capacity_option="max_loras", lock=asyncio.Lock())
        self._executor = executor

    async def _engine_load(self, entry: Entry) -> int:
        rank: int = await self._executor.call("load_adapter", entry.name, entry.path)
        return rank

    async def _engine_unload(self, entry: Entry) -> None:
        await self._executor.call("unload_adapter", entry.name)

    async def _engine_pin(self, entry: Entry) -> None:
        """Does nothing, because every loaded adapter has its own slot."""

    def _check_awake(self) -> None:
        """Does nothing, because the engine loads all adapters again when it wakes up."""
