"""A stage's options as vLLM's engine arguments."""

import dataclasses
from collections.abc import Mapping

from pydantic import JsonValue
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.options import unknown_option
from stagemesh.services.engines.vllm.hidden_states.layer_checks import check_layers, check_room
from stagemesh.services.engines.vllm.hidden_states.row_messages import CONFIG_KEY
from stagemesh.services.engines.vllm.options import HiddenStatesOptions
from stagemesh.services.engines.vllm.run_ahead import scheduler

# "uni" alone is turned into "mp" on CPU, which costs a third process.
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_WORKER = "stagemesh.services.engines.vllm.worker.StageWorker"
_CPU_KV_CACHE_BYTES = 512 << 20
_RESERVED = frozenset({"model", "disable_log_stats"})


def engine_arguments(options: Mapping[str, JsonValue], *, model: str, stage: str) -> AsyncEngineArgs:
    """The arguments for a stage's engine; raises InvalidRequestError for an option that vLLM does not have."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - _RESERVED
    for name in options:
        if name not in known:
            raise unknown_option(name, known, stage=stage)
    # An engine has one backend for structured outputs for good, and "auto" takes that of the first request. This one
    # reads all kinds of structure, and refuses before a request runs what it cannot follow.
    common: dict[str, JsonValue] = {
        "worker_cls": _WORKER,
        "structured_outputs_config": {"backend": "guidance"},
        "scheduling_policy": "priority",
        # Up to 4 GB in each process otherwise.
        "mm_processor_cache_gb": 0,
    }
    chosen = {**common, **_defaults(options), **options}
    try:
        return AsyncEngineArgs(model=model, disable_log_stats=True, **chosen)  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"stage {stage}: vLLM refuses its options: {exc}", reason="INVALID_OPTION") from exc


def configure(arguments: AsyncEngineArgs, states: HiddenStatesOptions, *, share_bytes: int, stage: str) -> None:
    """Has the workers make what a stage is to emit of hidden states; raises InvalidRequestError where they cannot."""
    layers = states.inner_layers
    config = arguments.create_model_config()
    check_layers(config, layers, stage=stage, pipeline_ranks=arguments.pipeline_parallel_size)
    check_room(states, share_bytes=share_bytes, width=config.get_hidden_size(), stage=stage)
    arguments.additional_config = {**arguments.additional_config, CONFIG_KEY: layers}
    if arguments.speculative_config is not None:
        # Which rows count is known once a step's tokens are.
        arguments.async_scheduling = False


def take_embeddings(arguments: AsyncEngineArgs, *, stage: str) -> None:
    """Has the workers take embeddings; raises InvalidRequestError where they cannot."""
    if arguments.speculative_config is not None:
        raise InvalidRequestError(
            f"stage {stage}: embeddings are added to those of sampled tokens, which speculative_config guesses; leave "
            "one of them out",
            reason="INVALID_OPTION",
        )
    arguments.enable_prompt_embeds = True


def limit_requests(config: VllmConfig) -> None:
    """Has requests computed as far as `limits` says."""
    kind = scheduler.LimitingAsyncScheduler if config.scheduler_config.async_scheduling else scheduler.LimitingScheduler
    config.scheduler_config.scheduler_cls = kind


def _defaults(options: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    if not current_platform.is_cpu():
        return {}
    defaults: dict[str, JsonValue] = {
        # Compiling takes a minute.
        "enforce_eager": True,
    }
    if "gpu_memory_utilization" not in options:
        # vLLM would take nearly all of the host's memory, and not start where something else holds some.
        defaults["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if options.get("tensor_parallel_size", 1) == options.get("pipeline_parallel_size", 1) == 1:
        defaults["distributed_executor_backend"] = _UNIPROC
    return defaults
