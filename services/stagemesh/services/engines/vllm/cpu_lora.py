"""A fix for vLLM's LoRA kernels on a CPU, which apply an adapter even to requests without an adapter."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


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
