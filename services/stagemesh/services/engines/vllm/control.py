"""The vllm engine's operator controls: sleep, caches, adapters and profiles. They may be called while requests run."""

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

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_LEVELS = (1, 2)
_WEIGHTS = "weights"
_TAGS: tuple[str, ...] = (_WEIGHTS, "kv_cache")
_ADAPTER_TARGETS = "stagemesh.services.engines.vllm.adapters.targets.AdapterTargets"


def prepare_control(arguments: "AsyncEngineArgs", *, profile_dir: str | None) -> None:
    """Sets the engine arguments that the controls for adapters and profiles need.

    `profile_dir` is the folder for profiles, or None if profiles are disabled.
    """
    if arguments.enable_lora:
        arguments.worker_extension_cls = _ADAPTER_TARGETS
    if profile_dir is not None:
        from vllm.config import ProfilerConfig

        # `ignore_frontend` excludes the service's own process, because profiling would slow down its event loop.
        arguments.profiler_config = ProfilerConfig(
            profiler="torch", torch_profiler_dir=private_folder(profile_dir), ignore_frontend=True
        )


class _CoreRecorder:
    """Starts and stops the profiler of vLLM's workers. `prepare_control` sets the folder for the profiles."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm

    async def begin(self, prefix: str, *, max_steps: int | None) -> None:
        await core_call(self._llm, self._llm.start_profile(prefix, max_iterations=max_steps))

    async def end(self) -> None:
        await core_call(self._llm, self._llm.stop_profile())


class Control:
    """The operator controls of one running AsyncLLM.

    At most one of these changes runs at a time: sleep, wake-up, clearing caches, or changing adapters.
    """

    def __init__(self, llm: "AsyncLLM", *, stage: str, profile_dir: str | None) -> None:
        self._llm, self._stage = llm, stage
        self._lock = asyncio.Lock()
        self._level = 0
        self._sleep_state = SleepState(stage=stage)
        self._prompt_tokens = self._cached_tokens = 0
        self.adapters = Adapters(llm, stage=stage, lock=self._lock, check_awake=self.check_awake)
        self.profiles = Profiles(
            _CoreRecorder(llm),
            stage=stage,
            base=profile_dir,
            private=Path(llm.vllm_config.profiler_config.torch_profiler_dir),
        )

    def check_awake(self) -> None:
        """Raises NotReadyError if the model's weights or the key-value cache are asleep."""
        self._sleep_state.check_awake()

    def check_sleep(self, level: int) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise UnsupportedError(
                f"engine vllm of stage {self._stage} cannot sleep on {current_platform.device_type}",
                metadata={"engine": "vllm", "ability": "sleep", "device": current_platform.device_type},
            )
        if level not in _LEVELS:
            raise InvalidRequestError(f"level is {level}; it must be 1 (keeps the weights in host memory) or 2")
        if not self._llm.vllm_config.model_config.enable_sleep_mode:
            raise NotReadyError(
                f"stage {self._stage} was started without sleep mode; start it with the option enable_sleep_mode",
                reason="SLEEP_DISABLED",
            )

    def asleep(self) -> Sequence[str]:
        return self._sleep_state.asleep()

    async def sleep(self, level: int) -> None:
        self.check_sleep(level)
        async with self._lock:
            self.check_awake()
            await run_to_completion(self._sleep(level))

    async def wake(self, tags: Sequence[str]) -> None:
        async with self._lock:
            if wanted := self._sleep_state.select(tags):
                await run_to_completion(self._wake(wanted))

    async def clear_caches(self, *, preempt: bool) -> None:
        async with self._lock:
            self.check_awake()
            if not await core_call(self._llm, self._llm.reset_prefix_cache(reset_running_requests=preempt)):
                raise NotReadyError(
                    f"running requests use the cache of stage {self._stage}; wait for them, or set preempt",
                    reason="CACHE_IN_USE",
                )

    def cache_statistics(self) -> CacheStatistics:
        cache = self._llm.vllm_config.cache_config
        return CacheStatistics(
            blocks=cache.num_gpu_blocks or 0,
            block_tokens=cache.block_size,
            prefix_caching=bool(cache.enable_prefix_caching),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def count_prompt(self, output: "RequestOutput") -> None:
        """Adds a finished request's prompt tokens to the cache statistics. `output` is the request's last output."""
        self._prompt_tokens += len(output.prompt_token_ids or ())
        self._cached_tokens += output.num_cached_tokens or 0

    # -- internals

    async def _sleep(self, level: int) -> None:
        # Mode "wait", because requests that were just aborted may still have a step to finish.
        await core_call(self._llm, self._llm.sleep(level, mode="wait"))
        self._level, self._sleep_state.tags = level, set(_TAGS)

    async def _wake(self, tags: set[str]) -> None:
        await core_call(self._llm, self._llm.wake_up(sorted(tags)))
        if _WEIGHTS in tags and self._level > 1:
            await worker_call(self._llm, "reload_weights")
            await self.adapters.restore()
        self._sleep_state.tags -= tags
