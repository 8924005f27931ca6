"""The vllm engine's abilities: vLLM's own controls, made safe to use while it runs."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.cleanup import run_to_completion
from stagemesh.services.engines.profiles import Profiles, private_folder
from stagemesh.services.engines.sleep import SleepState
from stagemesh.services.engines.vllm.adapters.control import Adapters
from stagemesh.services.engines.vllm.core_calls import core_call, worker_call
from stagemesh.services.engines.vllm.profiles import CoreRecorder

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

LEVELS = (1, 2)
_WEIGHTS = "weights"
_TAGS: tuple[str, ...] = (_WEIGHTS, "kv_cache")
_TARGETS = "stagemesh.services.engines.vllm.adapters.targets.AdapterTargets"


def prepare_control(arguments: "AsyncEngineArgs", *, profile_dir: str | None) -> None:
    """Sets what the controls need vLLM to be started with."""
    if arguments.enable_lora:
        arguments.worker_extension_cls = _TARGETS
    if profile_dir is not None:
        from vllm.config import ProfilerConfig

        # Without the service's own process, whose event loop it would slow down.
        arguments.profiler_config = ProfilerConfig(
            profiler="torch", torch_profiler_dir=private_folder(profile_dir), ignore_frontend=True
        )


class Control:
    """The controls of one running AsyncLLM."""

    def __init__(self, llm: "AsyncLLM", *, stage: str, profile_dir: str | None) -> None:
        self._llm, self._stage = llm, stage
        self._lock = asyncio.Lock()
        self._level = 0
        self._sleepers = SleepState(stage=stage)
        self._prompt_tokens = self._cached_tokens = 0
        self.adapters = Adapters(llm, stage=stage, lock=self._lock, check_awake=self.check_awake)
        self.profiles = Profiles(
            CoreRecorder(llm),
            stage=stage,
            base=profile_dir,
            private=Path(llm.vllm_config.profiler_config.torch_profiler_dir),
        )

    def check_awake(self) -> None:
        """Raises NotReadyError while anything sleeps."""
        self._sleepers.check_awake()

    def check_sleep(self, level: int) -> None:
        """See `SleepControl`."""
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise UnsupportedError(
                f"engine vllm of stage {self._stage} has not the ability sleep on {current_platform.device_type}: vLLM "
                "would ignore it there",
                metadata={"engine": "vllm", "ability": "sleep", "device": current_platform.device_type},
            )
        if level not in LEVELS:
            raise InvalidRequestError(f"level is {level}; it must be 1 (keep the weights in host memory) or 2")
        if not self._llm.vllm_config.model_config.enable_sleep_mode:
            raise NotReadyError(
                f"stage {self._stage} was not started for sleeping; start it with the option enable_sleep_mode",
                reason="SLEEP_DISABLED",
            )

    def asleep(self) -> Sequence[str]:
        """See `SleepControl`."""
        return self._sleepers.asleep()

    async def sleep(self, level: int) -> None:
        """See `SleepControl`."""
        self.check_sleep(level)
        async with self._lock:
            self.check_awake()
            await run_to_completion(self._sleep(level))

    async def wake(self, tags: Sequence[str]) -> None:
        """See `SleepControl`."""
        async with self._lock:
            if wanted := self._sleepers.select(tags):
                await run_to_completion(self._wake(wanted))

    async def clear_caches(self, *, preempt: bool) -> None:
        """See `CacheControl`."""
        async with self._lock:
            self.check_awake()
            if not await core_call(self._llm, self._llm.reset_prefix_cache(reset_running_requests=preempt)):
                raise NotReadyError(
                    f"requests hold a part of the cache of stage {self._stage}; wait for them, or have them preempted",
                    reason="CACHE_IN_USE",
                )

    def cache_statistics(self) -> CacheStatistics:
        """See `CacheControl`."""
        cache = self._llm.vllm_config.cache_config
        return CacheStatistics(
            blocks=cache.num_gpu_blocks or 0,
            block_tokens=cache.block_size,
            prefix_caching=bool(cache.enable_prefix_caching),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def count_prompt(self, output: "RequestOutput") -> None:
        """Takes note of a request's last output."""
        self._prompt_tokens += len(output.prompt_token_ids or ())
        self._cached_tokens += output.num_cached_tokens or 0

    # -- inner workings

    async def _sleep(self, level: int) -> None:
        # Those that were aborted a moment ago may have a step to go.
        await core_call(self._llm, self._llm.sleep(level, mode="wait"))
        self._level, self._sleepers.tags = level, set(_TAGS)

    async def _wake(self, tags: set[str]) -> None:
        await core_call(self._llm, self._llm.wake_up(sorted(tags)))
        if _WEIGHTS in tags and self._level > 1:
            await worker_call(self._llm, "reload_weights")
            await self.adapters.restore()
        self._sleepers.tags -= tags
