"""The embeddings feature: a stage receives embeddings from an upstream stage instead of a prompt. The embeddings may
arrive while the request runs.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from stagemesh.common.wire.tensors import Array, TensorSpec
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.vllm.options import INPUTS_EMBEDS
from stagemesh.services.engines.vllm.rows import input_memory
from stagemesh.services.engines.vllm.rows.input_rows import InputRows

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class Embeddings(InputRows):
    """The request feature for embeddings from an upstream stage.

    Rows of the prompt replace the embeddings of the placeholder tokens. Later rows are added to the embeddings of
    sampled tokens.
    """

    runner_module = __name__

    def __init__(self, *, dtype: str, stage: str) -> None:
        super().__init__(stage=stage)
        self._dtype = dtype
        self._spec = TensorSpec(dtype, ("tokens", "hidden"))

    def columns(self, model: "ModelConfig") -> list[input_memory.Column]:
        width = model.get_inputs_embeds_size()
        self._spec = TensorSpec(self._dtype, ("tokens", width))
        return [input_memory.Column(INPUTS_EMBEDS, self._dtype, width)]

    def read_rows(self, task: Task, packet: Packet) -> Mapping[str, Array]:  # noqa: ARG002  # no options
        # The stage accepts no other tensor. Each packet from an edge therefore contains this one.
        rows = packet.tensors[INPUTS_EMBEDS]
        self._spec.check(INPUTS_EMBEDS, rows)
        return {INPUTS_EMBEDS: rows}


class _AddsEmbeddings(input_memory.TakesRows):
    """Replaces the rows of placeholder tokens. Adds embeddings to the rows of sampled tokens."""

    def embed(self, inputs_embeds: torch.Tensor, rows: input_memory.StepRows) -> None:
        memory = self._inputs
        if memory is None or not self._slots:
            return
        (column,) = memory.ticket.columns
        for i, request_id in enumerate(rows.request_ids):
            slot = self._slots.get(request_id)
            if slot is None:
                continue
            first, end, position = int(rows.starts[i]), int(rows.starts[i + 1]), int(rows.positions[i])
            values = memory.columns[column.name][slot.slot, position : position + end - first]
            embeddings = input_memory.as_tensor(values, column.dtype).to(inputs_embeds)
            replaced = min(max(0, slot.prompt_tokens - position), end - first)
            inputs_embeds[first : first + replaced] = embeddings[:replaced]
            inputs_embeds[first + replaced : end] += embeddings[replaced:]


class RunnerV1(_AddsEmbeddings, input_memory.TakesRowsV1):
    """A mixin for the model runner in `vllm.v1.worker.gpu_model_runner`."""


class RunnerV2(_AddsEmbeddings, input_memory.TakesRowsV2):
    """A mixin for the model runner in `vllm.v1.worker.gpu.model_runner`."""
