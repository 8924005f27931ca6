"""The talker of Qwen3-Omni as a model of vLLM: a language model over the codes of an audio codec."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from stagemesh.services.engines.vllm.codec.base import RowParts
from stagemesh.services.models.codec_speech.code_predictor import ResidualSampling
from stagemesh.services.models.codec_speech.talker import TEXT_EMBEDDING, OmniTalker, Projection, ResidualTalker

_RESIDUALS = ResidualSampling(top_p=0.8)


class Qwen3OmniTalker(  # pyright: ignore[reportIncompatibleVariableOverride]
    ResidualTalker, OmniTalker, Qwen3MoeForCausalLM
):
    """The talker. It has the thinker's text embeddings, too, because its rows contain text that is spoken."""

    adds_states = False
    other_parts = ("thinker.", "code2wav.")
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
            "talker.codec_head.": "lm_head.",
            "talker.": "",
            TEXT_EMBEDDING: "text_embedding.",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        text = config.text_config
        self.text_embedding = VocabParallelEmbedding(
            config.text_vocab_size, config.thinker_hidden_size, prefix=maybe_prefix(prefix, "text_embedding")
        )
        sizes = (config.thinker_hidden_size, text.intermediate_size, text.hidden_size)
        self.text_projection, self.hidden_projection = Projection(*sizes), Projection(*sizes)
        self.add_code_predictor(config, vocabulary=text.vocab_size, sampling=_RESIDUALS)

    def embed_rows(self, parts: RowParts) -> torch.Tensor:
        """Returns the input embeddings of rows, [rows, width]."""
        text_ids, states = parts.text_ids, parts.states
        rows = self.text_projection(self.text_embedding(text_ids.clamp_min(0)))
        if states is not None:
            rows = torch.where(text_ids[:, None] < 0, self.hidden_projection(states.to(rows)), rows)
        return self.add_codes(rows, parts)
