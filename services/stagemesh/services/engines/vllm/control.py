"""The vllm engine's operator controls: sleep, caches, adapters and profiles. They may be used while requests run."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.adapter_files import AdapterFiles, Sizes, read_adapter
from stagemesh.services.engines.adapters import AdapterManager, Entry, check_rank
from stagemesh.services.engines.controls import Profiles, SleepManager
from stagemesh.services.engines.vllm.engine_core import CoreRefusalError, core_call, worker_call

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_log = logging.getLogger(__name__)

_WEIGHTS = "weights"
_TAGS: tuple[str, ...] = (_WEIGHTS, "kv_cache")


class VllmAdapters(AdapterManager):
    """Manages the LoRA adapters of one AsyncLLM by calls to vLLM's engine core."""

    def __init__(self, llm: "AsyncLLM", *, stage: str, lock: asyncio.Lock, check_awake: Callable[[], None]) -> None:
        """Creates the manager. `check_awake` is a function that raises NotReadyError if the engine is asleep."""
        config = llm.vllm_config.lora_config
        slots, capacity = (config.max_loras, config.max_cpu_loras or config.max_loras) if config else (0, 0)
        super().__init__(stage=stage, slots=slots, capacity=capacity, capacity_option="max_cpu_loras", lock=lock)
        self._llm, self._awake_check = llm, check_awake
        self._max_rank = config.max_lora_rank if config else 0

    async def restore(self) -> None:
        """Loads all adapters again. Called after vLLM has reloaded the model's weights.

        Unloads adapters that vLLM rejects. The caller must hold the manager's lock.
        """
        for entry in list(self._entries.values()):
            try:
                await core_call(self._llm, self._llm.add_lora(lora_request(entry)))
                if entry.pinned:
                    await self._engine_pin(entry)
            except CoreRefusalError as exc:
                _log.warning("cannot load adapter %s again: %s", entry.name, exc.message)
                await self._remove(entry)

    async def _engine_load(self, entry: Entry) -> int:
        files = await asyncio.to_thread(read_adapter, entry.path)
        check_rank(entry.name, files.rank, most=self._max_rank, taker=f"stage {self._stage}")
        files.check(await self._targets(files))
        try:
            await core_call(self._llm, self._llm.add_lora(lora_request(entry)))
        except CoreRefusalError as exc:
            # If loading fails late, vLLM has already registered the adapter.
            await core_call(self._llm, self._llm.remove_lora(entry.number))
            raise InvalidRequestError(f"adapter {entry.name!r}: {exc.message}", reason="INVALID_ADAPTER") from exc
        return files.rank

    async def _targets(self, files: AdapterFiles) -> Mapping[str, Sizes | None]:
        """Returns the sizes in the model of the layers that an adapter changes, by layer name.

        A size is None if it is unknown. The layers that the model does not have are omitted.
        """
        names = sorted(files.layers)
        answers: list[dict[str, list[int]]] = await worker_call(self._llm, "adapter_targets", names)
        return {name: Sizes(*sizes) if sizes else None for answer in answers for name, sizes in answer.items()}

    async def _engine_unload(self, entry: Entry) -> None:
        await core_call(self._llm, self._llm.remove_lora(entry.number))

    async def _engine_pin(self, entry: Entry) -> None:
        await core_call(self._llm, self._llm.pin_lora(entry.number))

    def _check_awake(self) -> None:
        self._awake_check()


def lora_request(entry: Entry) -> "LoRARequest":
    """Returns vLLM's description of a loaded adapter, with which a request selects the adapter."""
    from vllm.lora.request import LoRARequest

    # The name contains the number, because vLLM caches adapters by name and path, and the files may change later.
    return LoRARequest(f"{entry.name}#{entry.number}", entry.number, entry.path)


class Control(SleepManager):
    """The operator controls of one running AsyncLLM.

    At most one of these operations runs at a time: sleep, wake-up, clearing caches, or changing adapters.
    """

    def __init__(self, llm: "AsyncLLM", *, stage: str, profile_dir: str | None) -> None:
        super().__init__(stage=stage)
        self.llm = llm
        self._level = 0
        self._prompt_tokens = self._cached_tokens = 0
        self.adapters = VllmAdapters(llm, stage=stage, lock=self._lock, check_awake=self.check_awake)
        self.profiles = Profiles(
            lambda prefix, max_steps: core_call(llm, llm.start_profile(prefix, max_iterations=max_steps)),
            lambda: core_call(llm, llm.stop_profile()),
            stage=stage,
            base=profile_dir,
            # `engine_arguments` has set this folder.
            private=Path(llm.vllm_config.profiler_config.torch_profiler_dir),
        )

    def check_sleep(self, level: int) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise UnsupportedError(
                f"engine vllm of stage {self._stage} cannot sleep on {current_platform.device_type}",
                metadata={"engine": "vllm", "ability": "sleep", "device": current_platform.device_type},
            )
        super().check_sleep(level)
        if not self.llm.vllm_config.model_config.enable_sleep_mode:
            raise NotReadyError(
                f"stage {self._stage} was started without sleep mode; start it with the option enable_sleep_mode",
                reason="SLEEP_DISABLED",
            )

    async def clear_caches(self, *, preempt: bool) -> None:
        async with self._lock:
            self.check_awake()
            if not await core_call(self.llm, self.llm.reset_prefix_cache(reset_running_requests=preempt)):
                raise NotReadyError(
                    f"running requests use the cache of stage {self._stage}; wait for them, or set preempt",
                    reason="CACHE_IN_USE",
                )

    def cache_statistics(self) -> CacheStatistics:
        cache = self.llm.vllm_config.cache_config
        return CacheStatistics(
            blocks=cache.num_gpu_blocks or 0,
            block_tokens=cache.block_size,
            prefix_caching=bool(cache.enable_prefix_caching),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def count_prompt(self, output: "RequestOutput") -> None:
        """Adds the prompt of a finished request to the cache statistics.

        `output` is the request's last output from vLLM.
        """
        self._prompt_tokens += len(output.prompt_token_ids or ())
        self._cached_tokens += output.num_cached_tokens or 0

    # -- internals

    async def _engine_sleep(self, level: int) -> set[str]:
        # Mode "wait", because requests that were just aborted may still have a step to finish.
        await core_call(self.llm, self.llm.sleep(level, mode="wait"))
        self._level = level
        return set(_TAGS)

    async def _engine_wake(self, tags: set[str]) -> None:
        await core_call(self.llm, self.llm.wake_up(sorted(tags)))
        if _WEIGHTS in tags and self._level > 1:
            await worker_call(self.llm, "reload_weights")
            await self.adapters.restore()
