"""Mixins for vLLM's model runners that write embeddings from an upstream stage into a step's input embeddings."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from stagemesh.services.engines.vllm.rows.input_runner import TakesRows, TakesRowsV1, TakesRowsV2, as_tensor


class _AddsEmbeddings(TakesRows):
    """Replaces the rows of placeholder tokens. Adds embeddings to the rows of sampled tokens."""

    def embed(
        self,
        inputs_embeds: torch.Tensor,
        request_ids: Sequence[str],
        starts: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> None:
        memory = self._inputs
        if memory is None or not self._slots:
            return
        (column,) = memory.ticket.columns
        for i, request_id in enumerate(request_ids):
            slot = self._slots.get(request_id)
            if slot is None:
                continue
            first, end, position = int(starts[i]), int(starts[i + 1]), int(positions[i])
            values = memory.columns[column.name][slot.slot, position : position + end - first]
            rows = as_tensor(values, column.dtype).to(inputs_embeds)
            replaced = min(max(0, slot.prompt_tokens - position), end - first)
            inputs_embeds[first : first + replaced] = rows[:replaced]
            inputs_embeds[first + replaced : end] += rows[replaced:]


class RunnerV1(_AddsEmbeddings, TakesRowsV1):
    """A mixin for the model runner in `vllm.v1.worker.gpu_model_runner`."""


class RunnerV2(_AddsEmbeddings, TakesRowsV2):
    """A mixin for the model runner in `vllm.v1.worker.gpu.model_runner`."""
