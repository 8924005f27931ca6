"""The talker of Qwen2.5-Omni as a model of vLLM: a language model over the codes of an audio codec."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from stagemesh.services.engines.vllm.codec.base import RowParts, SampledFrames
from stagemesh.services.models.codec_speech.talker import TEXT_EMBEDDING, OmniTalker


# The name of the model.
class Qwen2_5OmniTalker(OmniTalker, LlamaForCausalLM):  # noqa: N801  # pyright: ignore[reportIncompatibleVariableOverride]
    """The talker. It has the thinker's text embeddings, too, because its rows contain text that is spoken."""

    adds_states = True
    code_groups = 1
    other_parts = ("thinker.", "token2wav.")
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.codec_head.": "lm_head.",
            "talker.": "",
            TEXT_EMBEDDING: "text_embedding.",
            "thinker.": None,
            "token2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        self.pad_text_id: int = config.tts_text_pad_token_id
        self._begin_code: int = config.tts_codec_start_token_id
        self._pad_code: int = config.tts_codec_pad_token_id
        self._end_code: int = config.tts_codec_end_token_id
        # The embeddings have the thinker's width, and a projection to the talker's own follows.
        self.model.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.embedding_size, prefix=maybe_prefix(prefix, "model.embed_tokens")
        )
        self.text_embedding = VocabParallelEmbedding(
            config.text_vocab_size, config.embedding_size, prefix=maybe_prefix(prefix, "text_embedding")
        )
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the input embeddings of codes without text, [codes, width]."""
        return self.thinker_to_talker_proj(self.model.embed_tokens(input_ids))  # type: ignore[no-any-return]

    def embed_rows(self, parts: RowParts) -> torch.Tensor:
        """Returns the input embeddings of rows, [rows, width]. The frames have no residual codes."""
        text_ids, states, codes, _ = parts
        rows = self.text_embedding(text_ids.clamp_min(0)) * (text_ids[:, None] >= 0)
        if states is not None:
            rows = rows + states.to(rows)
        rows = rows + self.model.embed_tokens(codes.clamp_min(0)) * (codes[:, None] >= 0)
        return self.thinker_to_talker_proj(rows)  # type: ignore[no-any-return]

    def predict_residuals(self, frames: SampledFrames) -> torch.Tensor:
        """Returns int64[frames, 0], because a frame has one code."""
        return frames.codes.new_empty(len(frames.codes), 0)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits of the codes. The code that begins the audio is suppressed.

        The padding ends the audio, too: its probability is added to that of the end.
        """
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            ends = logits[:, [self._pad_code, self._end_code]]
            logits[:, self._end_code] = ends.logsumexp(-1)
            logits[:, [self._pad_code, self._begin_code]] = -torch.inf
        return logits
