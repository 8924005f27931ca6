"""On a CPU: what an adapter adds to a batch's rows, those of requests without an adapter left out."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class AppliesOnlyChosen(PunicaWrapperCPU):
    """Named by `plugin` to vLLM, which makes it.

    vLLM marks a row without an adapter by the slot -1, and on a CPU takes that for the last slot. So once every slot
    has an adapter, a request without one would get that of a neighbour in its batch.
    """

    def add_expand(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """See vLLM."""
        with _kept(y, self.token_lora_indices < 0):
            super().add_expand(y, *args, **kwargs)

    def add_lora_embedding(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """See vLLM."""
        with _kept(y, self.token_lora_indices < 0):
            super().add_lora_embedding(y, *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """See vLLM."""
        with _kept(y, self.sampler_indices < 0):
            super().add_lora_logits(y, *args, **kwargs)


@contextmanager
def _kept(y: torch.Tensor, rows: torch.Tensor) -> Generator[None]:
    """These rows of `y` [..., width] stay as they are."""
    flat = y.view(-1, y.shape[-1])
    before = flat[rows]
    yield
    flat[rows] = before
