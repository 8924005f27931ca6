"""Loads, unloads and leases the LoRA adapters of a running vLLM engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.abilities import Adapter
from stagemesh.services.engines.adapters.files import AdapterFiles, Sizes, read_adapter
from stagemesh.services.engines.adapters.registry import (
    AdapterRegistry,
    Entry,
    check_name,
    check_rank,
    disabled_error,
    unknown_adapter_error,
)
from stagemesh.services.engines.cleanup import run_to_completion
from stagemesh.services.engines.vllm.core_calls import CoreRefusalError, core_call, worker_call

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_log = logging.getLogger(__name__)


class Adapters:
    """Manages the LoRA adapters of one AsyncLLM.

    Acquires `lock` for each change, so that no other control, such as sleep, changes the engine at the same time.
    `check_awake` raises NotReadyError if the engine is asleep.
    """

    def __init__(self, llm: "AsyncLLM", *, stage: str, lock: asyncio.Lock, check_awake: Callable[[], None]) -> None:
        self._llm, self._stage = llm, stage
        self._lock, self._check_awake = lock, check_awake
        self._pinning = asyncio.Lock()
        config = llm.vllm_config.lora_config
        self._max_rank = config.max_lora_rank if config else 0
        self._registry = (
            AdapterRegistry(stage, config.max_loras, config.max_cpu_loras or config.max_loras) if config else None
        )

    def list_adapters(self) -> Sequence[Adapter]:
        return self._registry.list_adapters() if self._registry else []

    @asynccontextmanager
    async def using(self, name: str | None) -> "AsyncGenerator[LoRARequest | None]":
        """Leases the adapter `name` until the context exits.

        Yields vLLM's object for the adapter, or None if `name` is None. Raises NotFoundError if the adapter is not
        loaded.
        """
        if name is None:
            yield None
        elif self._registry is None:
            raise unknown_adapter_error(self._stage, name)
        else:
            async with self._registry.using(name) as entry:
                yield _request(entry)

    async def load(self, name: str, path: str) -> Adapter:
        registry = self._enabled()
        check_name(name)
        async with self._lock:
            self._check_awake()
            entry = registry.find_loaded(name, path)
            if entry is None:
                files = await asyncio.to_thread(read_adapter, path)
                entry = await run_to_completion(
                    self._load(registry, Entry(name, path, files.rank, registry.next_number()), files)
                )
            return entry.adapter

    async def unload(self, name: str, *, drain: bool) -> None:
        registry = self._enabled()
        async with registry.unloading(name, drain=drain) as entry, self._lock:
            self._check_awake()
            await run_to_completion(self._unload(registry, entry))

    async def pin(self, name: str) -> Adapter:
        async with self._pinning, self._enabled().pinning(name) as entry, self._lock:
            self._check_awake()
            await run_to_completion(self._pin(entry))
            return entry.adapter

    async def restore(self) -> None:
        """Loads all adapters again after vLLM has reloaded the model's weights. Unloads an adapter that vLLM rejects.

        The caller must hold `lock`.
        """
        registry = self._registry
        for entry in registry.entries() if registry else ():
            assert registry is not None
            try:
                await core_call(self._llm, self._llm.add_lora(_request(entry)))
                if entry.pinned:
                    await self._pin(entry)
            except CoreRefusalError as exc:
                _log.warning("cannot load adapter %s again: %s", entry.name, exc.message)
                await self._unload(registry, entry)

    # -- internals

    def _enabled(self) -> AdapterRegistry:
        if self._registry is None:
            raise disabled_error(self._stage)
        return self._registry

    async def _load(self, registry: AdapterRegistry, entry: Entry, files: AdapterFiles) -> Entry:
        check_rank(entry.name, files.rank, most=self._max_rank, taker=f"stage {self._stage}")
        files.check(await self._targets(files))
        try:
            await core_call(self._llm, self._llm.add_lora(_request(entry)))
        except CoreRefusalError as exc:
            # If loading fails late, vLLM has already registered the adapter.
            await core_call(self._llm, self._llm.remove_lora(entry.number))
            raise InvalidRequestError(f"adapter {entry.name!r}: {exc.message}", reason="INVALID_ADAPTER") from exc
        registry.add(entry)
        return entry

    async def _targets(self, files: AdapterFiles) -> Mapping[str, Sizes | None]:
        """Returns the size of each layer that an adapter changes, or None if the size is unknown, by layer name."""
        names = sorted(files.layers)
        answers: list[dict[str, list[int]]] = await worker_call(self._llm, "adapter_targets", names)
        return {name: Sizes(*sizes) if sizes else None for answer in answers for name, sizes in answer.items()}

    async def _unload(self, registry: AdapterRegistry, entry: Entry) -> None:
        await core_call(self._llm, self._llm.remove_lora(entry.number))
        registry.remove(entry)

    async def _pin(self, entry: Entry) -> None:
        await core_call(self._llm, self._llm.pin_lora(entry.number))
        entry.pinned = True


def _request(entry: Entry) -> "LoRARequest":
    from vllm.lora.request import LoRARequest

    # The name contains the number, because vLLM caches adapters by name and path, and the files may change later.
    return LoRARequest(f"{entry.name}#{entry.number}", entry.number, entry.path)
