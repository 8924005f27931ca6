"""Builds vLLM's engine arguments from the options of a stage."""

import dataclasses
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from vllm.config import ProfilerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.settings import set_library_variables
from stagemesh.services.engines.controls import private_folder
from stagemesh.services.engines.options import unknown_option
from stagemesh.services.engines.vllm.features import RUNNER_MODULES, RequestFeature

# vLLM replaces the short name "uni" with "mp" on a CPU, which starts a third process.
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_WORKER = "stagemesh.services.engines.vllm.worker.StageWorker"
_CPU_KV_CACHE_BYTES = 512 << 20
_RESERVED = frozenset({"model", "disable_log_stats"})
_OPENS_PORTS: Mapping[str, tuple[object, ...]] = {
    "nnodes": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni", "mp", _UNIPROC),
    "kv_transfer_config": (None,),
    "kv_events_config": (None,),
    "ec_transfer_config": (None,),
    "enable_fault_tolerance": (False,),
}
"""The engine arguments with which vLLM listens on TCP ports, and their values without ports.

vLLM and torch unpickle what arrives at most of these ports, from anyone.
"""
_WITHIN_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def engine_arguments(
    options: Mapping[str, JsonValue],
    *,
    model: str,
    stage: str,
    features: Sequence[RequestFeature] = (),
    profile_dir: str | None = None,
    permits_plain_tcp: bool = True,
) -> AsyncEngineArgs:
    """Returns vLLM's engine arguments for a stage, including the stage's options and the project's own defaults.

    Each feature adds the arguments that it needs. `profile_dir` is the folder for profiles, or None if profiles are
    disabled. `permits_plain_tcp` is whether vLLM may listen on ports without TLS. If it has no reason to, sets
    environment variables that confine vLLM and torch to the loopback interface. Raises InvalidRequestError if an option
    is unknown to vLLM or not permitted, or if vLLM rejects its value.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - _RESERVED
    for name in options:
        if name not in known:
            raise unknown_option(name, known, stage=stage)
    common: dict[str, JsonValue] = {
        "worker_cls": _WORKER,
        # With "auto" the first request would determine the backend of all requests. This backend supports all kinds of
        # structure, and rejects an unsupported structure before the request runs.
        "structured_outputs_config": {"backend": "guidance"},
        "scheduling_policy": "priority",
        # vLLM's default is 4 GB in each process.
        "mm_processor_cache_gb": 0,
    }
    chosen = {**common, **_defaults(options), **options}
    try:
        arguments = AsyncEngineArgs(model=model, disable_log_stats=True, **chosen)  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"stage {stage}: vLLM rejects its options: {exc}", reason="INVALID_OPTION") from exc
    _check_ports(arguments, stage=stage, permitted=permits_plain_tcp)
    modules = [feature.runner_module for feature in features if feature.runner_module is not None]
    arguments.additional_config = {**arguments.additional_config, RUNNER_MODULES: modules}
    for feature in features:
        feature.set_arguments(arguments)
    if profile_dir is not None:
        # `ignore_frontend` excludes the service's own process, because profiling would slow down its event loop.
        arguments.profiler_config = ProfilerConfig(
            profiler="torch", torch_profiler_dir=private_folder(profile_dir), ignore_frontend=True
        )
    return arguments


def _check_ports(arguments: AsyncEngineArgs, *, stage: str, permitted: bool) -> None:
    opening = [name for name, without in _OPENS_PORTS.items() if getattr(arguments, name) not in without]
    if not opening:
        set_library_variables(_WITHIN_HOST, replace=True)
    elif not permitted:
        raise InvalidRequestError(
            f"stage {stage}: with {', '.join(opening)} vLLM listens on ports without TLS, and this process has "
            "certificates; remove these options, or set `insecure_tcp: true` at the stage if its network is closed by "
            "other means",
            reason="INVALID_OPTION",
            metadata={"option": opening[0]},
        )


def _defaults(options: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the project's defaults for engine arguments on a CPU. Empty on other devices."""
    if not current_platform.is_cpu():
        return {}
    # Compilation takes a minute.
    defaults: dict[str, JsonValue] = {"enforce_eager": True}
    if "gpu_memory_utilization" not in options:
        # vLLM would use nearly all of the host's memory, and would not start if other programs use some of it.
        defaults["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if options.get("tensor_parallel_size", 1) == options.get("pipeline_parallel_size", 1) == 1:
        defaults["distributed_executor_backend"] = _UNIPROC
    return defaults
