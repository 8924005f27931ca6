"""The worker class of the vllm engine, which adds the features' mixins to vLLM's model runner.

vLLM receives the name of this class in the engine argument `worker_cls`. The module also checks that vLLM loads
all parts of combined weights, and fixes errors of vLLM on a CPU.
"""

import atexit
import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

from stagemesh.services.engines.vllm.engine_core import record_failure
from stagemesh.services.engines.vllm.features import RUNNER_MODULES

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


_EXPERTS = ("w13_weight", "w2_weight")
_MAX_LISTED_NAMES = 10


@contextmanager
def checked_weights() -> Generator[None]:
    """Lets vLLM raise ValueError, which names the weights, if it loads a model whose weights are incomplete.

    Quantized models and draft models are not checked: their loaders leave some weights to later phases.
    """
    load_weights = DefaultModelLoader.load_weights

    def load_and_check(self: DefaultModelLoader, model: nn.Module, model_config: ModelConfig) -> None:
        is_checked = model_config.quantization is None and model_config.runner_type != "draft"
        weights = _combined_weights(model) if is_checked else {}
        with torch.no_grad():
            for weight in weights.values():
                weight.fill_(torch.nan)
        load_weights(self, model, model_config)
        if missing := [name for name, weight in weights.items() if weight.isnan().any()]:
            further = f" and {len(missing) - _MAX_LISTED_NAMES} more" if len(missing) > _MAX_LISTED_NAMES else ""
            raise ValueError(
                f"the checkpoint lacks parts of weights, or has NaN in them: {', '.join(missing[:_MAX_LISTED_NAMES])}"
                f"{further}; check that the checkpoint is complete, and copy it again"
            )

    DefaultModelLoader.load_weights = load_and_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        DefaultModelLoader.load_weights = load_weights  # type: ignore[method-assign]


def _combined_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the floating-point weights of linear layers, embeddings and experts, by vLLM's name."""
    weights = dict[str, nn.Parameter]()
    modules = cast("Iterator[tuple[str, Any]]", model.named_modules())
    for name, module in modules:
        parameters: Iterator[tuple[str, nn.Parameter]] = module.named_parameters(recurse=False)
        for kind, weight in parameters:
            is_combined = kind == "weight" and isinstance(module, (LinearBase, VocabParallelEmbedding))
            if weight.is_floating_point() and (is_combined or kind in _EXPERTS):
                weights[f"{name}.{kind}"] = weight
    return weights


_NICENESS = 5
"""The niceness of a process that computes on the processors which the event loops of the stages use, too.

A process of niceness 10 would get a tenth of the time of any other busy process on the host, and 5 gets a third.
"""


class StageWorker(Worker):
    """vLLM's worker for a GPU or a CPU. Adds the features' mixins to its model runner."""

    def init_device(self) -> None:
        """Creates vLLM's model runner and adds the features' mixins to the model runner's class."""
        super().init_device()
        runner: Any = self.model_runner
        kind: type[Any] = runner.__class__
        version = "RunnerV2" if issubclass(kind, GPUModelRunnerV2) else "RunnerV1"
        config = cast("dict[str, list[str]]", self.vllm_config.additional_config)
        mixins = [getattr(import_module(module), version) for module in config[RUNNER_MODULES]]
        if current_platform.is_cpu():
            mixins.append(FixesCpuRunner)
            # The event loops of the host's stages need a processor for microseconds, but at once.
            os.nice(_NICENESS)
        runner.__class__ = type(f"Stage{kind.__name__}", (*mixins, kind), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model and checks that its weights are complete. Records an error for the replica, which vLLM does
        not tell the cause.
        """
        try:
            with checked_weights():
                super().load_model(*args, **kwargs)
        except Exception as exc:
            record_failure(exc)
            raise

    def call_runner(self, method: str, *args: object) -> Any:
        """Calls a method of the model runner and returns its result.

        Called by the replica through vLLM's `collective_rpc`.
        """
        return getattr(self.model_runner, method)(*args)

    def adapter_targets(self, names: list[str]) -> dict[str, list[int]]:
        """Returns the sizes of the layers in `names` that this worker has and a LoRA adapter can change, by name.

        `names` contains PEFT's layer names. A size is [inputs, outputs], the total numbers over all ranks, or an empty
        list if the size is unknown. vLLM itself checks a layer of unknown size when it loads the adapter. The replica
        calls this method through vLLM's `collective_rpc`.
        """
        runner: Any = self.model_runner
        manager = runner.lora_manager._adapter_manager  # noqa: SLF001  # vLLM has no public accessor
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        renaming = None if mapper is None else mapper.get_rename_mapper()
        sizes = _layer_sizes(manager)
        own_names = {name: parse_fine_tuned_lora_name(f"{name}.lora_A.weight", renaming)[0] for name in names}
        return {name: sizes[own_name] for name, own_name in own_names.items() if own_name in sizes}

    def shutdown(self) -> None:
        """Shuts the worker down. At exit, freezes all objects, so that the final garbage collection skips them.

        This saves several seconds.
        """
        super().shutdown()
        atexit.register(gc.freeze)


class FixesCpuRunner:
    """A mixin that fixes two errors of vLLM's V1 model runner on a CPU: in `load_model` and in `sample_tokens`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model. Also allocates the buffers for tensors from the previous pipeline rank.

        vLLM allocates these buffers in a warm-up, but does not run the warm-up on a CPU.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples the step's tokens. Does not use the random generators of requests whose prefill is unfinished.

        vLLM samples a token for every request of a step and discards the token of an unfinished prefill. vLLM then
        rewinds the request's generator by the offset that a GPU would use. A CPU generator cannot be rewound, which
        terminates the engine ("CPU Generator does not use offset"). With this fix, the discarded token is sampled with
        the generator that all requests share.
        """
        runner: Any = self
        generators: dict[int, torch.Generator] = runner.input_batch.generators
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        removed = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(removed)


def _layer_sizes(manager: Any) -> dict[str, list[int]]:
    """Returns the sizes of the layers that a LoRA adapter can change, [inputs, outputs], by vLLM's layer name.

    The size is an empty list if it is unknown. A layer that packs several projections, such as q, k and v, has one dict
    entry for each projection.
    """
    sizes: dict[str, list[int]] = {}
    for name, module in manager.modules.items():
        layer = module.base_layer
        parts: list[str] = manager.packed_modules.get(name, [])
        outputs = _layer_outputs(layer, len(parts) or 1)
        for number, part in enumerate(parts or [name]):
            sizes[part] = [layer.input_size, outputs[number]] if outputs else []
    return sizes


def _layer_outputs(layer: Any, parts: int) -> list[int]:
    if not hasattr(layer, "input_size"):
        return []
    if parts == 1:
        return [layer.output_size]
    if hasattr(layer, "total_num_kv_heads"):
        # The layer's own output_sizes count replicated key and value heads once per rank.
        heads = [layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads]
        widths = [layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size)]
        outputs = [count * width for count, width in zip(heads, widths, strict=True)]
    else:
        outputs = list(getattr(layer, "output_sizes", []))
    return outputs if len(outputs) == parts else []


class SelectiveLoraKernels(PunicaWrapperCPU):
    """vLLM's LoRA kernels for a CPU, restricted to the rows of requests that name an adapter.

    vLLM marks a row without an adapter with slot index -1. On a CPU, this index selects the last slot. If the last slot
    contains an adapter, vLLM would therefore apply that adapter to the row. The module `plugin` tells vLLM to use this
    class.
    """

    def add_expand(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with _restored(y, self.token_lora_indices < 0):
            super().add_expand(y, *args, **kwargs)

    def add_lora_embedding(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with _restored(y, self.token_lora_indices < 0):
            super().add_lora_embedding(y, *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with _restored(y, self.sampler_indices < 0):
            super().add_lora_logits(y, *args, **kwargs)


@contextmanager
def _restored(y: torch.Tensor, rows: torch.Tensor) -> Generator[None]:
    """Returns a context that restores some rows of `y` to their original values when the context exits.

    `y` has the shape [..., width]. `rows` is a mask of the rows to restore.
    """
    flat = y.view(-1, y.shape[-1])
    before = flat[rows]
    yield
    flat[rows] = before
