"""Fixes vLLM's LoRA kernels on a CPU, which would apply an adapter to requests without an adapter."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class AppliesOnlyChosen(PunicaWrapperCPU):
    """Applies adapters only to the rows of requests that name an adapter. `plugin` passes the class's name to vLLM.

    vLLM marks a row without an adapter with slot -1. On a CPU, this index selects the last slot. If every slot has an
    adapter, a request without an adapter would therefore use another request's adapter.
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
    """Restores the given rows of `y`, [..., width], at the end of the block."""
    flat = y.view(-1, y.shape[-1])
    before = flat[rows]
    yield
    flat[rows] = before
