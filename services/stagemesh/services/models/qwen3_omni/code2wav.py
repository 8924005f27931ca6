"""The stage code2wav, which converts codec frames to audio."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from pydantic import JsonValue, PositiveInt
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from stagemesh.services.models.checkpoint import load_weights, read_section, require_folder
from stagemesh.services.models.codec_speech.streaming import (
    BatchState,
    TransformerConfig,
    WaveDecoder,
    WindowTransformer,
)
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, choose_placement
from stagemesh.services.models.codec_speech.weights import Weights
from stagemesh.services.models.qwen3_omni.description import read_config

_PART = "code2wav"


@dataclass(frozen=True)
class Code2WavConfig(TransformerConfig):
    """The part `code2wav_config` of a checkpoint's config. Names and defaults are those of transformers."""

    codebook_size: PositiveInt = 2048
    num_quantizers: PositiveInt = 16
    decoder_dim: PositiveInt = 1536
    upsample_rates: tuple[PositiveInt, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[PositiveInt, ...] = (2, 2)

    def __post_init__(self) -> None:
        steps = prod(self.upsampling_ratios)
        for rate in self.upsample_rates:
            steps = (steps - 1) * rate
        if steps < 1:
            raise ValueError("upsampling_ratios and upsample_rates yield no sample for the first frame of a stream")


class Code2Wav:
    """A `CodecDecoder` with the weights of Qwen3-Omni's code2wav."""

    def __init__(self, weights: Weights, config: Code2WavConfig, *, device: torch.device) -> None:
        self.groups, self.codebook_size, self.device = config.num_quantizers, config.codebook_size, device
        width = config.hidden_size
        self._embedding = weights.place(weights.take("code_embedding.weight", self.codebook_size * self.groups, width))
        self._offsets = torch.arange(self.groups, device=device, dtype=torch.int32) * self.codebook_size
        self._transformer = WindowTransformer(weights.part("pre_transformer"), config)
        self._decoder = WaveDecoder(
            weights,
            inputs=width,
            channels=config.decoder_dim,
            ratios=config.upsampling_ratios,
            rates=config.upsample_rates,
        )
        self.reach = self._transformer.reach + self._decoder.reach

    def __call__(self, codes: Tensor, batch: BatchState) -> Tensor:
        samples = self._decoder(self._transform(codes, batch), batch)
        batch.advance(codes.shape[1])
        return samples

    def remember(self, codes: Tensor, batch: BatchState) -> None:
        # The convolutions are most of the work, and depend only on the last few frames.
        self._decoder(self._transform(codes, batch)[:, -self._decoder.reach :], batch)
        batch.advance(codes.shape[1])

    def _transform(self, codes: Tensor, batch: BatchState) -> Tensor:
        # The hidden state of a frame is the mean of its codes' embeddings.
        means = F.embedding_bag((codes + self._offsets).flatten(0, 1), self._embedding, mode="mean")
        return self._transformer(means.view(*codes.shape[:2], -1), batch)


def make_code2wav(model: Path | None, options: Mapping[str, JsonValue]) -> CodecVocoder:
    """Loads the function `qwen3_omni.code2wav` from the checkpoint folder `model`.

    Raises InvalidRequestError if `model` is None or an option is invalid, and NotReadyError (LOAD_FAILED) if the
    checkpoint is incomplete or of another model.
    """
    folder = require_folder(model, "the function qwen3_omni.code2wav")
    placement = choose_placement(options)
    config = read_section(folder, read_config(folder), name="code2wav_config", kind=Code2WavConfig)
    weights = Weights(load_weights(folder, f"{_PART}."), device=placement.device, dtype=placement.dtype)
    decoder = Code2Wav(weights.part(_PART), config, device=placement.device)
    weights.check(f"code2wav in {folder}")
    return CodecVocoder(decoder)
