"""The keys of vLLM-Omni's files: the handling of each, and the report of keys that are not imported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from stagemesh.common.plugins.connectors import AUTO, NIXL, SHM
from stagemesh.vllm_omni.source import Section


class Outcome(Enum):
    """The consequence of a key that is not converted. The order is that of the report."""

    MISSING = "missing"
    """No valid pipeline can be written without it."""
    NOT_CARRIED = "not carried over"
    """The pipeline is valid, but behaves differently or is slower until the remedy has been applied."""
    NOT_NEEDED = "not needed"
    """The key has no effect in Stagemesh, or describes what Stagemesh always does."""


class Item(NamedTuple):
    """A key of the config that is not converted."""

    outcome: Outcome
    path: str
    """The path of the key in the config, for example "stage_args[1].engine_args.worker_cls"."""
    text: str
    """The reason, and after a semicolon the remedy, if there is one."""


@dataclass
class Report:
    """The items of an import, at most one for each path."""

    _items: dict[str, Item] = field(default_factory=dict[str, Item])

    def add(self, outcome: Outcome, path: str, text: str) -> None:
        """Adds an item. Ignores a path that was already reported."""
        self._items.setdefault(path, Item(outcome, path, text))

    def items(self, outcome: Outcome) -> Sequence[Item]:
        """Returns the items with an outcome, in the order in which they were added."""
        return [item for item in self._items.values() if item.outcome is outcome]


VLLM_ARGUMENTS = frozenset(
    {
        "allowed_local_media_path",
        "async_scheduling",
        "attention_backend",
        "block_size",
        "compilation_config",
        "config_format",
        "cpu_offload_gb",
        "cudagraph_capture_sizes",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "distributed_executor_backend",
        "dtype",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_flashinfer_autotune",
        "enable_lora",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "enforce_eager",
        "generation_config",
        "gpu_memory_utilization",
        "hf_overrides",
        "interleave_mm_strings",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "limit_mm_per_prompt",
        "linear_backend",
        "load_format",
        "long_prefill_token_threshold",
        "mamba_ssm_cache_dtype",
        "max_cudagraph_capture_size",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "media_io_kwargs",
        "mm_encoder_tp_mode",
        "mm_processor_cache_gb",
        "mm_processor_kwargs",
        "moe_backend",
        "num_gpu_blocks_override",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "override_generation_config",
        "pipeline_parallel_size",
        "quantization",
        "revision",
        "scheduling_policy",
        "skip_mm_profiling",
        "speculative_config",
        "tensor_parallel_size",
        "tokenizer",
        "tokenizer_mode",
        "trust_remote_code",
    }
)
"""The engine arguments of vLLM that are copied to the options of a vllm stage."""
SAMPLING: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""The default sampling parameters, with their names in `override_generation_config` of a vllm stage."""
DIFFUSION_SAMPLING = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")
"""The default sampling parameters of a diffusion stage that are options of the same name."""
STEP_CACHE: Mapping[str, str] = {
    "Fn_compute_blocks": "first_blocks",
    "Bn_compute_blocks": "last_blocks",
    "max_warmup_steps": "warmup_steps",
    "residual_diff_threshold": "threshold",
    "max_continuous_cached_steps": "max_skip_steps",
}
"""The keys of `cache_config` with `cache_backend: cache_dit`, with their names in `step_cache` of a diffusion stage."""
PARALLEL: Mapping[str, str] = {"cfg_parallel_size": "cfg", "ulysses_degree": "ulysses", "hsdp_shard_size": "hsdp"}
"""The degrees of parallelism of a diffusion stage, with their names in `parallel`."""
PIPELINE_WIDE = (
    "trust_remote_code",
    "distributed_executor_backend",
    "dtype",
    "quantization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "data_parallel_size",
    "pipeline_parallel_size",
)
"""The keys of a deploy config that apply to every stage."""
CONNECTORS: Mapping[str, str] = {
    "SharedMemoryConnector": SHM,
    "NixlConnector": NIXL,
    "MooncakeConnector": AUTO,
    "MooncakeStoreConnector": AUTO,
    "MooncakeTransferEngineConnector": AUTO,
    "MoriTransferEngineConnector": AUTO,
    "YuanrongConnector": AUTO,
    "YuanrongTransferEngineConnector": AUTO,
}
"""The connectors of vLLM-Omni, with the `connector` of an edge that replaces them."""


class Note(NamedTuple):
    """The reason why a key is not converted. The text is the reason, and the remedy after a semicolon."""

    outcome: Outcome
    text: str


def _needless(text: str) -> Note:
    return Note(Outcome.NOT_NEEDED, text)


def _lost(text: str) -> Note:
    return Note(Outcome.NOT_CARRIED, text)


_OWN_PROCESS = _needless("each replica is a process of its own")
_STREAMS = _needless("chunks are sent when they exist, and the credit of the flow bounds what is in flight")
_RATE = _lost("requests are limited for the whole pipeline; set `limits.max_in_flight`")
_ENVIRONMENT = _lost("a pipeline file sets no environment variables; set them where the stage's process is started")
_REQUEST_SEED = _lost("a seed belongs to a request; set it there (`stagemesh generate --seed`)")
_DEVICES = _lost(
    "a pipeline file does not place this stage; set CUDA_VISIBLE_DEVICES where its process is started (`stagemesh "
    "serve stage`), or `gpus` in the values of the Helm chart"
)
_REPLICAS = _lost("several engines of a stage are replicas; set `replicas` of the stage")
_CODEC_STATE = _needless("the decoder keeps the state of earlier frames, so that no frame is decoded twice")

STAGE_NOTES: Mapping[str, Note] = {
    "async_chunk": _needless("tensors are sent when they exist; only edges with audio codes gather them in chunks"),
    "async_chunk_stream": _STREAMS,
    "chunk_processor": _needless("the transform of the edge divides the data into chunks"),
    "custom_process_next_stage_input_func": _needless("the transform of the edge does this work"),
    "engine_output_type": _needless("the edges and outputs determine the tensors that the stage emits"),
    "env": _ENVIRONMENT,
    "final_output_type": _needless("the stage gives no final output"),
    "hf_config_name": _needless("the engine finds its part of the checkpoint's config"),
    "is_comprehension": _needless("a pipeline has no such mark; prompts go to every stage without incoming edges"),
    "process": _OWN_PROCESS,
    "requires_multimodal_data": _needless("a stage that can read media receives those of the prompt"),
    "run_mode": _OWN_PROCESS,
}
VLLM_NOTES: Mapping[str, Note] = {
    **STAGE_NOTES,
    "additional_config": _lost("its keys belong to vLLM-Omni's own models; leave it out"),
    "data_parallel_size": _REPLICAS,
    "default_sampling_params.detokenize": _needless("text is made for each request that wants it"),
    "default_sampling_params.ignore_eos": _lost("it belongs to a request; set `min_tokens` and `max_tokens` there"),
    "default_sampling_params.seed": _REQUEST_SEED,
    "default_sampling_params.stop_token_ids": _lost("stop tokens belong to a request; set `stop_token_ids` there"),
    "kv_transfer_config": _lost("KV caches are handed over by `split` of a stage; set `split` (docs/vllm.md)"),
    "omni_kv_config": _lost("KV caches are handed over by `split` of a stage, and only to vllm stages; leave it out"),
    "model_arch": _needless("vLLM reads the architecture from the checkpoint"),
    "subtalker_sampling_params": _lost(
        "residual codes are sampled as the checkpoint's generation_config.json says; change that file"
    ),
    "tts_args": _lost("the options of the stage that reads the prompt have their own limits; leave it out"),
}
CODEC_NOTES: Mapping[str, Note] = {
    "default_sampling_params.stop_token_ids": _needless("the talker knows the code that ends the speech"),
    "generation_config": _lost("the talker reads the checkpoint's generation_config.json; leave it out"),
    "hf_overrides": _lost("the option `codec` selects the talker's part of the checkpoint; leave it out"),
    "pipeline_parallel_size": _lost("a talker runs with one pipeline rank; set `tensor_parallel_size` instead"),
    "speculative_config": _lost("a talker samples each frame; leave it out"),
}
"""The notes on the arguments that vLLM has, but not in a stage with the option `codec`."""
_NO_TOKENS = _needless("the stage has neither a scheduler of tokens nor a KV cache")
_NOT_VLLM = _needless("the stage does not run in vLLM")
FUNCTION_NOTES: Mapping[str, Note] = {
    **STAGE_NOTES,
    **dict.fromkeys(
        (
            "async_scheduling",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "max_model_len",
            "max_num_batched_tokens",
            "mm_processor_cache_gb",
        ),
        _NO_TOKENS,
    ),
    **dict.fromkeys(
        (
            "compilation_config",
            "distributed_executor_backend",
            "enable_flashinfer_autotune",
            "enforce_eager",
            "load_format",
            "max_cudagraph_capture_size",
            "model_arch",
            "skip_mm_profiling",
            "trust_remote_code",
        ),
        _NOT_VLLM,
    ),
    "data_parallel_size": _REPLICAS,
    "default_sampling_params": _needless("the stage samples no tokens"),
    "devices": _DEVICES,
    "dtype": _lost("function stages choose their dtype by the device; set the option `dtype` if the function has it"),
    "gpu_memory_utilization": _needless("the stage allocates only the memory that it uses"),
    "pipeline_parallel_size": _needless("the stage runs in one process"),
    "quantization": _lost("function stages run unquantized; leave it out"),
    "tensor_parallel_size": _lost("the stage runs in one process; set `replicas` for more throughput"),
    "tts_args": _lost("the options of the stage that reads the prompt have their own limits; leave it out"),
}
_OTHER_PARALLELISM = _lost(
    "the engine divides work only by `parallel.cfg`, `parallel.ulysses` and `parallel.hsdp`; set one of them"
)
_NO_CACHE = _lost("diffusion stages accept no KV cache of a language model; use a model whose stages exchange tensors")
DIFFUSION_NOTES: Mapping[str, Note] = {
    **STAGE_NOTES,
    **dict.fromkeys(
        (
            "async_scheduling",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "max_model_len",
            "max_num_batched_tokens",
            "mm_processor_cache_gb",
        ),
        _NO_TOKENS,
    ),
    **dict.fromkeys(
        (
            "enable_expert_parallel",
            "pipeline_parallel_size",
            "ring_degree",
            "sequence_parallel_size",
            "tensor_parallel_size",
            "vae_patch_parallel_size",
        ),
        _OTHER_PARALLELISM,
    ),
    "cache_config": _lost("the engine's step caches have other settings; set `step_cache` (docs/diffusion-tuning.md)"),
    "data_parallel_size": _REPLICAS,
    "default_sampling_params.detokenize": _NO_TOKENS,
    "default_sampling_params.max_tokens": _NO_TOKENS,
    "default_sampling_params.num_outputs_per_prompt": _lost("the number of choices belongs to a request; set it there"),
    "default_sampling_params.repetition_penalty": _NO_TOKENS,
    "default_sampling_params.seed": _REQUEST_SEED,
    "default_sampling_params.temperature": _NO_TOKENS,
    "default_sampling_params.top_k": _NO_TOKENS,
    "default_sampling_params.top_p": _NO_TOKENS,
    "devices": _DEVICES,
    "diffusion_attention_backend": _lost("the engine uses torch's attention; leave it out"),
    "diffusion_attention_config": _lost("the engine uses torch's attention; leave it out"),
    "attention_backend": _lost("the engine uses torch's attention; leave it out"),
    "distributed_executor_backend": _needless("the engine starts one process for each rank of `parallel`"),
    "flow_shift": _lost("the engine uses the checkpoint's scheduler config; change the shift there"),
    "gpu_memory_utilization": _lost("the engine measures the free memory; set `memory_bytes` to limit it"),
    "kv_transfer_config": _NO_CACHE,
    "model_arch": _needless("the engine reads the class from the checkpoint's model_index.json"),
    "model_class_name": _needless("the engine reads the class from the checkpoint's model_index.json"),
    "omni_kv_config": _NO_CACHE,
    "quantization": _lost("quantization has other names; set `load.quantization` (docs/diffusion-tuning.md)"),
    "step_execution": _needless("every request is computed one step at a time"),
    "trust_remote_code": _needless("the engine runs no code of the checkpoint"),
    "vae_use_slicing": _lost("the engine decodes requests one by one; leave it out"),
    "vae_use_tiling": _lost("the engine decodes without tiles; lower `max_side` if memory does not suffice"),
}
TOP_NOTES: Mapping[str, Note] = {
    "active_stream_window": _STREAMS,
    "custom_voice_dir": _lost(
        "voices belong to the checkpoint, or are cloned from audio of the request; see docs/omni.md"
    ),
    "defaults.max_inflight": _RATE,
    "defaults.window_size": _STREAMS,
    "duplex_session": _lost("sessions have other settings; set `sessions` (docs/sessions.md)"),
    "enabled": _OWN_PROCESS,
    "model_runner": _needless("vLLM selects its model runner"),
    "platforms": _lost("the values for other devices are omitted; import a config that has them as its own values"),
    "session_mode": _lost("every pipeline answers requests and sessions; set `sessions` (docs/sessions.md)"),
}
EDGE_NOTES: Mapping[str, Note] = {"max_inflight": _RATE, "window_size": _STREAMS}
_NEGOTIATED = _needless("replicas tell each other how their memory is reached")
CONNECTOR_NOTES: Mapping[str, Note] = {
    **dict.fromkeys(
        (
            f"extra.{name}"
            for name in (
                "device_name",
                "host",
                "localbuf",
                "master",
                "memory_pool_device",
                "metadata_server",
                "proto",
                "protocol",
                "segment",
                "zmq_port",
            )
        ),
        _NEGOTIATED,
    ),
    "extra.codec_left_context_frames": _CODEC_STATE,
    "extra.codec_streaming": _STREAMS,
    "extra.connector_get_max_wait": _needless("a request waits until its deadline"),
    "extra.connector_get_max_wait_first_chunk": _needless("a request waits until its deadline"),
    "extra.connector_get_sleep_s": _needless("consumers are notified instead of polling"),
    "extra.decode_cudagraph_capture_sizes": _needless("the decoder captures no CUDA graphs"),
    "extra.memory_pool_size": _lost("each stage has an arena; set `data_plane.arena_bytes`"),
    "extra.shm_threshold_bytes": _needless("chunks up to `data_plane.inline_limit_bytes` are sent inline"),
}


def report_rest(section: Section, notes: Mapping[str, Note], report: Report, *, unknown: str) -> None:
    """Reports every value of a section that has not been taken. `unknown` is the text for keys without a note.

    A known key that is off, such as a flag that is false or a degree of parallelism that is 1, is not needed.
    """
    for name, given in section.values.items():
        mapping, _, key = name.partition(".")
        note = notes.get(name) or notes.get(mapping) or (notes.get(key) if mapping == "parallel_config" else None)
        if note is None:
            report.add(Outcome.NOT_CARRIED, given.path, unknown)
        elif note.outcome is Outcome.NOT_CARRIED and _is_off(name, given.value):
            report.add(Outcome.NOT_NEEDED, given.path, "the feature is off")
        else:
            report.add(note.outcome, given.path, note.text)
    for path, winner in section.shadowed:
        report.add(Outcome.NOT_NEEDED, path, f"{winner} replaces it")


def _is_off(name: str, value: object) -> bool:
    return value is False or value in ({}, [], "") or (name.endswith(("_size", "_degree")) and value == 1)
