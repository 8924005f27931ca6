"""The embeddings feature: a stage receives embeddings from an upstream stage instead of a prompt."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Array, TensorSpec
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.vllm.options import INPUTS_EMBEDS
from stagemesh.services.engines.vllm.rows.input_memory import Column
from stagemesh.services.engines.vllm.rows.input_rows import InputRows

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class Embeddings(InputRows):
    """The request feature for embeddings from an upstream stage.

    Rows of the prompt replace the embeddings of the placeholder tokens. Later rows are added to the embeddings of
    sampled tokens.
    """

    runner_module = "stagemesh.services.engines.vllm.embeddings.runner"

    def __init__(self, *, dtype: str, stage: str) -> None:
        super().__init__(stage=stage)
        self._dtype = dtype
        self._spec = TensorSpec(dtype, ("tokens", "hidden"))

    def columns(self, model: "ModelConfig") -> list[Column]:
        width = model.get_inputs_embeds_size()
        self._spec = TensorSpec(self._dtype, ("tokens", width))
        return [Column(INPUTS_EMBEDS, self._dtype, width)]

    def read_rows(self, task: Task, packet: Packet) -> Mapping[str, Array]:  # noqa: ARG002  # no options
        rows = packet.tensors.get(INPUTS_EMBEDS)
        if rows is None:
            raise InvalidChunkError(
                f"a chunk contains {', '.join(packet.tensors) or 'no tensor'} instead of {INPUTS_EMBEDS}"
            )
        self._spec.check(INPUTS_EMBEDS, rows)
        return {INPUTS_EMBEDS: rows}
