"""The talker of Qwen3-TTS as a model of vLLM: a language model over the codes of an audio codec."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from stagemesh.services.models.codec_speech.code_predictor import CodePredictor, Draws, ResidualSampling
from stagemesh.services.models.qwen3_tts.description import read_generation_config

_SPECIAL_CODES = 1024
"""The number of codes at the end of the vocabulary that are never sampled, except the code that ends the audio."""


class Qwen3TTSTalker(Qwen3ForCausalLM):
    """The talker. Its rows are sums of text, codes and states, for example the x-vector of a voice."""

    adds_states = True
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.text_embedding.": "text_embedding.",
            "talker.codec_head.": "lm_head.",
            "talker.": "",
            "speaker_encoder.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        self.pad_text_id: int = config.tts_pad_token_id
        self.code_groups: int = config.num_code_groups
        self.text_embedding = VocabParallelEmbedding(
            config.text_vocab_size, config.text_hidden_size, prefix=maybe_prefix(prefix, "text_embedding")
        )
        self.text_projection = _Projection(config.text_hidden_size, config.hidden_size)
        self.code_predictor = CodePredictor(config.code_predictor_config, outer_width=config.hidden_size)
        self._sampling = _residual_sampling(Path(vllm_config.model_config.model))
        first = config.vocab_size - _SPECIAL_CODES
        suppressed = [code for code in range(first, config.vocab_size) if code != config.codec_eos_token_id]
        self.suppressed: torch.Tensor
        self.register_buffer("suppressed", torch.tensor(suppressed), persistent=False)

    def embed_rows(
        self, text_ids: torch.Tensor, states: torch.Tensor | None, codes: torch.Tensor, residuals: torch.Tensor
    ) -> torch.Tensor:
        """Returns the input embeddings of rows. See `CodecModule` of the vllm engine."""
        rows = self.text_projection(self.text_embedding(text_ids.clamp_min(0))) * (text_ids[:, None] >= 0)
        if states is not None:
            rows = rows + states.to(rows)
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
        draws = Draws(seeds, positions, greedy, sampling=self._sampling)
        return self.code_predictor(states, self.embed_input_ids(codes), draws)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits of the first codes, in which special codes are suppressed."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[:, self.suppressed] = -torch.inf
        return logits

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Returns whether the talker does not use a weight, so that vLLM does not read files without its weights."""
        return not name.startswith("talker.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the talker's weights from the weights of a checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _residual_sampling(model: Path) -> ResidualSampling:
    """Returns how residual codes are drawn, as the checkpoint's generation_config.json says."""
    given, usual = read_generation_config(model), ResidualSampling(temperature=0.9)
    return ResidualSampling(*(given.get(f"subtalker_{name}", getattr(usual, name)) for name in usual._fields))


class _Projection(nn.Module):
    """Projects text embeddings to the talker's width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(inputs, inputs), nn.Linear(inputs, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(rows)))  # type: ignore[no-any-return]
