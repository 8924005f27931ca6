"""Checks that vLLM loads every part of the weights that it combines.

vLLM combines weights of a checkpoint, such as those of q, k and v or of all experts. It checks that a combined weight
was loaded, but not all parts of it, and would compute with arbitrary memory instead of a missing part.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

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
