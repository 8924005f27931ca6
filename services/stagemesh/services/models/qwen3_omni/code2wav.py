"""The stage code2wav, which converts codec frames to audio."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from stagemesh.services.models.checkpoint import load_weights, read_section, require_folder
from stagemesh.services.models.codec_speech.streaming import BatchState, DecoderConfig, WaveDecoder, WindowTransformer
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, FrameDecoder, choose_placement
from stagemesh.services.models.codec_speech.weights import Weights
from stagemesh.services.models.qwen3_omni.description import read_config

_PART = "code2wav"


@dataclass(frozen=True)
class Code2WavConfig(DecoderConfig):
    """The part `code2wav_config` of a checkpoint's config."""

    def __post_init__(self) -> None:
        steps = prod(self.upsampling_ratios)
        for rate in self.upsample_rates:
            steps = (steps - 1) * rate
        if steps < 1:
            raise ValueError("upsampling_ratios and upsample_rates yield no sample for the first frame of a stream")


class Code2Wav(FrameDecoder):
    """A decoder of codec frames with the weights of Qwen3-Omni's code2wav."""

    def __init__(self, weights: Weights, config: Code2WavConfig, *, device: torch.device) -> None:
        width = config.hidden_size
        super().__init__(WaveDecoder(weights, config, inputs=width), config, device=device)
        self._embedding = weights.place(weights.take("code_embedding.weight", self.codebook_size * self.groups, width))
        self._transformer = WindowTransformer(weights.part("pre_transformer"), config)
        self.reach = self._transformer.reach + self._waves.reach

    def _transform(self, codes: Tensor, batch: BatchState) -> Tensor:
        return self._transformer(self._embed(codes, mode="mean"), batch)


def make_code2wav(model: Path | None, options: Mapping[str, JsonValue]) -> CodecVocoder:
    """Loads the function `qwen3_omni.code2wav` from the checkpoint folder `model`.

    Raises InvalidRequestError if `model` is None or an option is invalid, and NotReadyError (LOAD_FAILED) if the
    checkpoint is incomplete or of another model.
    """
    folder = require_folder(model, "function qwen3_omni.code2wav")
    placement = choose_placement(options)
    config = read_section(folder, read_config(folder), name="code2wav_config", kind=Code2WavConfig)
    weights = Weights(load_weights(folder, f"{_PART}."), device=placement.device, dtype=placement.dtype)
    decoder = Code2Wav(weights.part(_PART), config, device=placement.device)
    weights.check(f"code2wav in {folder}")
    return CodecVocoder(decoder)
