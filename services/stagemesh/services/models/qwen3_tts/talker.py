"""The talker of Qwen3-TTS as a model of vLLM: a language model over the codes of an audio codec."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from stagemesh.services.engines.vllm.codec.base import RowParts
from stagemesh.services.models.checkpoint import read_generation_config
from stagemesh.services.models.codec_speech.code_predictor import ResidualSampling
from stagemesh.services.models.codec_speech.talker import Projection, ResidualTalker


class Qwen3TTSTalker(ResidualTalker, Qwen3ForCausalLM):
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
        width = config.text_hidden_size
        self.text_embedding = VocabParallelEmbedding(
            config.text_vocab_size, width, prefix=maybe_prefix(prefix, "text_embedding")
        )
        self.text_projection = Projection(width, width, config.hidden_size)
        self.add_code_predictor(
            config,
            vocabulary=config.vocab_size,
            sampling=_residual_sampling(Path(vllm_config.model_config.model)),
            outer_width=config.hidden_size,
        )

    def embed_rows(self, parts: RowParts) -> torch.Tensor:
        """Returns the input embeddings of rows, [rows, width]."""
        text_ids, states = parts.text_ids, parts.states
        rows = self.text_projection(self.text_embedding(text_ids.clamp_min(0))) * (text_ids[:, None] >= 0)
        if states is not None:
            rows = rows + states.to(rows)
        return self.add_codes(rows, parts)

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Returns whether the talker does not use a weight, so vLLM does not read files without its weights."""
        return not name.startswith("talker.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the talker's weights from the weights of a checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _residual_sampling(model: Path) -> ResidualSampling:
    """Returns how residual codes are drawn, as the checkpoint's generation_config.json says."""
    given, usual = read_generation_config(model), ResidualSampling(temperature=0.9)
    return ResidualSampling(*(given.get(f"subtalker_{name}", getattr(usual, name)) for name in usual._fields))
