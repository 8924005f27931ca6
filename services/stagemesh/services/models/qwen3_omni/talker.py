"""The talker of Qwen3-Omni as a model of vLLM: a language model over the codes of an audio codec."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from stagemesh.services.models.codec_speech.code_predictor import CodePredictor, Draws, ResidualSampling

_OTHERS = ("thinker.", "code2wav.")
_TEXT_EMBEDDING = "thinker.model.embed_tokens."
_SPECIAL_CODES = 1024
"""The number of codes at the end of the vocabulary that are never sampled, except the code that ends the audio."""


_RESIDUALS = ResidualSampling(top_p=0.8)


class Qwen3OmniTalker(Qwen3MoeForCausalLM, SupportsMRoPE):
    """The talker. It has the thinker's text embeddings, too, because its rows contain text that is spoken."""

    adds_states = False
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
            "talker.codec_head.": "lm_head.",
            "talker.": "",
            _TEXT_EMBEDDING: "text_embedding.",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        self.pad_text_id: int = config.tts_pad_token_id
        self.code_groups: int = config.num_code_groups
        self.text_embedding = VocabParallelEmbedding(
            config.text_vocab_size, config.thinker_hidden_size, prefix=maybe_prefix(prefix, "text_embedding")
        )
        self.text_projection, self.hidden_projection = _Projection(config), _Projection(config)
        self.code_predictor = CodePredictor(config.code_predictor_config)
        first = config.text_config.vocab_size - _SPECIAL_CODES
        suppressed = [code for code in range(first, config.text_config.vocab_size) if code != config.codec_eos_token_id]
        self.suppressed: torch.Tensor
        self.register_buffer("suppressed", torch.tensor(suppressed), persistent=False)

    def embed_rows(
        self, text_ids: torch.Tensor, states: torch.Tensor | None, codes: torch.Tensor, residuals: torch.Tensor
    ) -> torch.Tensor:
        """Returns the input embeddings of rows. See `CodecModule` of the vllm engine."""
        rows = self.text_projection(self.text_embedding(text_ids.clamp_min(0)))
        if states is not None:
            rows = torch.where(text_ids[:, None] < 0, self.hidden_projection(states.to(rows)), rows)
        rows = rows + self.embed_input_ids(codes.clamp_min(0)) * (codes[:, None] >= 0)
        return rows + self.code_predictor.embed(residuals.clamp_min(0)) * (residuals[:, :1] >= 0)  # type: ignore[no-any-return]

    def predict_residuals(
        self,
        states: torch.Tensor,
        codes: torch.Tensor,
        *,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the other codes of frames. See `CodecModule` of the vllm engine."""
        draws = Draws(seeds, positions, greedy, sampling=_RESIDUALS)
        return self.code_predictor(states, self.embed_input_ids(codes), draws)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits of the first codes, in which special codes are suppressed."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[:, self.suppressed] = -torch.inf
        return logits

    def get_mrope_input_positions(
        self,
        input_tokens: list[int],
        mm_features: list[Any],  # noqa: ARG002  # the talker has no media
    ) -> tuple[torch.Tensor, int]:
        """Returns positions as of a text. The positions of media rows replace them when they arrive."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Returns whether the talker does not use a weight, so that vLLM does not read files without its weights."""
        return name.startswith(_OTHERS) and not name.startswith(_TEXT_EMBEDDING)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the talker's weights and the thinker's text embeddings from the weights of a checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class _Projection(nn.Module):
    """Projects states of the thinker to the talker's width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner, width = config.text_config.intermediate_size, config.text_config.hidden_size
        self.linear_fc1 = nn.Linear(config.thinker_hidden_size, inner)
        self.linear_fc2 = nn.Linear(inner, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(rows)))  # type: ignore[no-any-return]
