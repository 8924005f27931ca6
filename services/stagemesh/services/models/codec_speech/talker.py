"""Parts of the talkers of codec speech models, as mixins for the classes of vLLM's language models."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagemesh.services.engines.vllm.codec.base import RowParts, SampledFrames
from stagemesh.services.models.codec_speech.code_predictor import CodePredictor, Draws, ResidualSampling

TEXT_EMBEDDING = "thinker.model.embed_tokens."
"""The part of an omni checkpoint that its talker uses in addition to its own."""
_SPECIAL_CODES = 1024
"""The number of codes at the end of the vocabulary that are never sampled, except the code that ends the audio."""


class ResidualTalker(nn.Module):
    """A mixin for a talker whose frames have a first code, which vLLM samples, and residual codes."""

    embed_input_ids: Callable[[torch.Tensor], torch.Tensor]
    """Returns the embeddings of first codes. A method of vLLM's class."""

    def add_code_predictor(
        self, config: Any, *, vocabulary: int, sampling: ResidualSampling, outer_width: int | None = None
    ) -> None:
        """Adds the code predictor to the module. Must be called at the end of its `__init__`.

        `config` is the talker's configuration, and `vocabulary` the number of first codes. `sampling` says how residual
        codes are drawn. `outer_width` is the talker's width if it differs from the predictor's.
        """
        self.pad_text_id: int = config.tts_pad_token_id
        self.code_groups: int = config.num_code_groups
        self.code_predictor = CodePredictor(config.code_predictor_config, outer_width=outer_width)
        self._sampling = sampling
        special = range(vocabulary - _SPECIAL_CODES, vocabulary)
        self.suppressed: torch.Tensor
        suppressed = torch.tensor([code for code in special if code != config.codec_eos_token_id])
        self.register_buffer("suppressed", suppressed, persistent=False)

    def add_codes(self, rows: torch.Tensor, parts: RowParts) -> torch.Tensor:
        """Adds the embeddings of the rows' codes to `rows`. A code of -1 is absent."""
        codes, residuals = parts.codes, parts.residuals
        rows = rows + self.embed_input_ids(codes.clamp_min(0)) * (codes[:, None] >= 0)
        return rows + self.code_predictor.embed(residuals.clamp_min(0)) * (residuals[:, :1] >= 0)

    def predict_residuals(self, frames: SampledFrames) -> torch.Tensor:
        """Returns the residual codes of frames, int64[frames, groups - 1]."""
        first = self.embed_input_ids(frames.codes)
        draws = Draws(frames, sampling=self._sampling)
        return self.code_predictor(frames.states, first, draws)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits of the first codes, in which special codes are suppressed."""
        logits = cast("torch.Tensor | None", super().compute_logits(hidden_states))  # type: ignore[misc]
        if logits is not None:
            logits[:, self.suppressed] = -torch.inf
        return logits


class OmniTalker(nn.Module, SupportsMRoPE):
    """A mixin for the talker in the checkpoint of an omni model. It has the thinker's text embeddings, too."""

    other_parts: tuple[str, ...]
    """The prefixes of the names of the weights that belong to other stages."""
    hf_to_vllm_mapper: WeightsMapper

    def get_mrope_input_positions(
        self,
        input_tokens: list[int],
        mm_features: list[Any],  # noqa: ARG002  # the talker has no media
    ) -> tuple[torch.Tensor, int]:
        """Returns positions as of a text. The positions of the rows replace them when they arrive."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    @classmethod
    def is_unused_checkpoint_weight(cls, name: str) -> bool:
        """Returns whether the talker does not use a weight, so vLLM does not read files without its weights."""
        return name.startswith(cls.other_parts) and not name.startswith(TEXT_EMBEDDING)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the talker's weights and the thinker's text embeddings from the weights of a checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class Projection(nn.Module):
    """Projects text embeddings or upstream states to the talker's width."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(rows)))  # type: ignore[no-any-return]
