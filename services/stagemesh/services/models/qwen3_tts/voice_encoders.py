"""The encoders that convert a reference voice to codec frames, and to a vector that represents the speaker
(x-vector).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own convention
from transformers import MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank
from transformers.initialization import no_init_weights
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from stagemesh.services.models.checkpoint import fill_module, load_error, read_config, read_section
from stagemesh.services.models.codec_speech import SAMPLE_RATE_HZ
from stagemesh.services.models.qwen3_tts import CODEC_FOLDER, CODEC_TYPE, MODEL_TYPE


class CodecEncoder:
    """An encoder with the weights of a checkpoint. It computes in float32."""

    def __init__(self, model: MimiModel, *, groups: int, samples_per_frame: int) -> None:
        self._model, self.groups, self._samples_per_frame = model, groups, samples_per_frame

    @torch.inference_mode()
    def encode(self, audio: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """Returns the codes of float32[samples] at 24 kHz, int32[frames, groups]. The last frame may be a part."""
        samples = torch.from_numpy(audio).to(self._model.device)
        encoded: Any = self._model.encode(samples[None, None], num_quantizers=self.groups)
        codes: Tensor = encoded.audio_codes[0].T[: -(-len(audio) // self._samples_per_frame)]
        return codes.to("cpu", torch.int32).numpy()


def make_model(section: Mapping[str, Any]) -> MimiModel:
    """Returns Mimi without its decoder, with uninitialized weights. `section` is the config of the encoder.

    Raises TypeError, ValueError or StrictDataclassError if the section is invalid.
    """
    config = MimiConfig(**section)
    # The reference implementation, with an older version of transformers, attends to the whole past.
    config.sliding_window = config.max_position_embeddings
    model = MimiModel(config)
    for name in ("upsample", "decoder_transformer", "decoder"):
        delattr(model, name)
    return model


def load_codec_encoder(model: Path, *, device: torch.device) -> CodecEncoder:
    """Loads the encoder in the folder `speech_tokenizer` of the checkpoint folder `model`.

    Raises NotReadyError (LOAD_FAILED) if the speech tokenizer is incomplete or of another type.
    """
    folder = model / CODEC_FOLDER
    config = read_config(folder, model_type=CODEC_TYPE)
    try:
        with no_init_weights():
            encoder = make_model(config["encoder_config"])
        groups, hop = int(config["encoder_valid_num_quantizers"]), int(config["encode_downsample_rate"])
    except (KeyError, TypeError, ValueError, StrictDataclassError) as exc:
        raise load_error(folder, f"the encoder's part of its config.json is invalid: {exc!r}") from exc
    fill_module(encoder, folder, prefix="encoder.", what="the codec encoder", device=device)
    return CodecEncoder(encoder, groups=groups, samples_per_frame=hop)


_WINDOW, _HOP = 1024, 256
_LEAST_POWER, _LEAST_AMPLITUDE = 1e-9, 1e-5
"""Bounds of spectrum and mel spectrogram. The logarithm of silence would be infinite otherwise."""


@dataclass(frozen=True)
class SpeakerEncoderConfig:
    """The part `speaker_encoder_config` of a checkpoint's config. Names and defaults are those of qwen-tts."""

    mel_dim: PositiveInt = 128
    enc_dim: PositiveInt = 1024
    enc_channels: tuple[PositiveInt, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[PositiveInt, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[PositiveInt, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: PositiveInt = 128
    enc_res2net_scale: PositiveInt = 8
    enc_se_channels: PositiveInt = 128
    sample_rate: Literal[24_000] = 24_000


class SpeakerEncoder:
    """A speaker encoder with the weights of a checkpoint. It computes in float32."""

    def __init__(self, network: nn.Module, config: SpeakerEncoderConfig, *, device: torch.device) -> None:
        self._network, self._device, self.width = network, device, config.enc_dim
        filters = mel_filter_bank(
            num_frequency_bins=_WINDOW // 2 + 1,
            num_mel_filters=config.mel_dim,
            min_frequency=0,
            max_frequency=SAMPLE_RATE_HZ / 2,
            sampling_rate=SAMPLE_RATE_HZ,
            norm="slaney",
            mel_scale="slaney",
        )
        self._filters = torch.from_numpy(filters).to(device, torch.float32)
        self._window = torch.hann_window(_WINDOW, device=device)

    @torch.inference_mode()
    def embed(self, audio: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Returns the vector of a voice, float32[width]. `audio` is float32[samples] at 24 kHz, at least 0.1 s long."""
        spectrogram = self.convert(torch.from_numpy(audio).to(self._device))
        vector: Tensor = self._network(spectrogram[None])
        return vector[0].cpu().numpy()

    def convert(self, audio: Tensor) -> Tensor:
        """Returns the logarithmic mel spectrogram of float32[samples], [frames, mel_dim]. A frame is 256 samples."""
        padding = (_WINDOW - _HOP) // 2
        padded = F.pad(audio[None], (padding, padding), mode="reflect")[0]
        spectrum = torch.stft(padded, _WINDOW, _HOP, window=self._window, center=False, return_complex=True)
        amplitudes = torch.sqrt(spectrum.real.square() + spectrum.imag.square() + _LEAST_POWER)
        return torch.log((amplitudes.T @ self._filters).clamp(min=_LEAST_AMPLITUDE))


def make_network(config: SpeakerEncoderConfig) -> nn.Module:
    """Returns the network ECAPA-TDNN (https://arxiv.org/abs/2005.07143) with uninitialized weights.

    It converts [rows, frames, mel_dim] to [rows, enc_dim].
    """
    # transformers' class reads nothing else from its config.
    return ECAPA_TimeDelayNet(cast("Any", config))


def load_speaker_encoder(model: Path, *, device: torch.device) -> SpeakerEncoder:
    """Loads the speaker encoder of the checkpoint folder `model`.

    Raises NotReadyError (LOAD_FAILED) if the checkpoint is of another model, or lacks a speaker encoder or weights.
    """
    config = read_config(model, model_type=MODEL_TYPE)
    section = read_section(model, config, name="speaker_encoder_config", kind=SpeakerEncoderConfig)
    with no_init_weights():
        network = make_network(section)
    fill_module(network, model, prefix="speaker_encoder.", what="the speaker encoder", device=device)
    return SpeakerEncoder(network, section, device=device)
