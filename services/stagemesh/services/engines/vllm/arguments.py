"""A stage's options as vLLM's engine arguments."""

import dataclasses
from collections.abc import Mapping

from pydantic import JsonValue
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from stagemesh.connectors.errors import InvalidRequestError
from stagemesh.services.engines.options import unknown_option

# "uni" alone is turned into "mp" on CPU, which costs a third process.
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_CPU_KV_CACHE_BYTES = 512 << 20
_RESERVED = frozenset({"model", "disable_log_stats"})


def engine_arguments(options: Mapping[str, JsonValue], *, model: str, stage: str) -> AsyncEngineArgs:
    """The arguments for a stage's engine; raises InvalidRequestError for an option that vLLM does not have."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - _RESERVED
    for name in options:
        if name not in known:
            raise unknown_option(name, known, stage=stage)
    chosen: dict[str, JsonValue] = {**_defaults(options), **options}
    try:
        return AsyncEngineArgs(model=model, disable_log_stats=True, **chosen)  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"stage {stage}: vLLM refuses its options: {exc}", reason="INVALID_OPTION") from exc


def _defaults(options: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    if not current_platform.is_cpu():
        return {}
    defaults: dict[str, JsonValue] = {
        # Compiling takes a minute, and seeded sampling dies on a prefill that is cut in two.
        "enforce_eager": True,
        "enable_chunked_prefill": False,
    }
    if "gpu_memory_utilization" not in options:
        # vLLM would take nearly all of the host's memory, and not start where something else holds some.
        defaults["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if options.get("tensor_parallel_size", 1) == options.get("pipeline_parallel_size", 1) == 1:
        defaults["distributed_executor_backend"] = _UNIPROC
    return defaults
