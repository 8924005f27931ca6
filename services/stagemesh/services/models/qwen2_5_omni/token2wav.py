"""The stage token2wav, which converts codec frames to audio.

A diffusion transformer converts codes to a mel spectrogram (`mel_decoder`), and BigVGAN, a network of convolutions,
converts the spectrogram to samples. Both look ahead. A block of frames is final when the codes of `look_ahead_blocks`
further blocks have arrived, or when the stream has ended. The samples depend only on the blocks that a call processes,
on all earlier ones, and on the seed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, JsonValue
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavModel,
)

from stagemesh.common.wire.tensors import Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.engines.options import parse_options
from stagemesh.services.models.checkpoint import fill_module, load_error, read_config
from stagemesh.services.models.codec_speech.description import choose_speaker
from stagemesh.services.models.codec_speech.vocoder import Codes, check_codes, choose_placement
from stagemesh.services.models.qwen2_5_omni import MODEL_TYPE
from stagemesh.services.models.qwen2_5_omni.description import load_speakers
from stagemesh.services.models.qwen2_5_omni.mel_decoder import MelDecoder

_MAX_BLOCKS = 64
"""The maximum number of final blocks that are decoded together, summed over the streams. Bounds the memory."""


@dataclass(frozen=True)
class _Options:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    look_ahead_blocks: Annotated[int, Field(ge=0, le=256)] = 1
    steps: Annotated[int, Field(ge=2, le=100)] = 10


@dataclass
class Stream:
    """The state of one request."""

    seed: int
    voice: Tensor
    """The speaker, as `MelDecoder.embed_voice` returns it."""
    codes: Codes
    """The codes of the blocks that are not final yet."""
    blocks: int = 0
    """The number of final blocks."""
    past: Tensor | None = None
    """The values that `MelDecoder.solve` retained, or None before the first window."""
    mel: Tensor | None = None
    """The last final frames, which BigVGAN's next samples depend on, [mel size, frames]."""


class _Window(NamedTuple):
    """The codes of a stream that are decoded next."""

    stream: Stream
    codes: int
    kept: int
    """The number of final codes, at the beginning of the window."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Windows of one shape share a batch."""
        return self.codes, self.kept, 0 if self.stream.mel is None else self.stream.mel.shape[1]


class Token2Wav:
    """A `Function` that converts codec frames to audio."""

    def __init__(self, model: Qwen2_5OmniToken2WavModel, folder: Path, options: _Options) -> None:
        """Reads the speakers in `folder`. Raises NotReadyError (LOAD_FAILED) if there are none."""
        self._vocoder: Qwen2_5OmniToken2WavBigVGANModel = model.code2wav_bigvgan_model
        self._decoder = MelDecoder(model.code2wav_dit_model, steps=options.steps)
        self._device = model.device
        self._ahead = options.look_ahead_blocks * self._decoder.codes_in_block
        self._hop, self._context = prod(self._vocoder.config.upsample_rates), context_frames(self._vocoder)
        with torch.inference_mode():
            self._voices = {
                name: self._decoder.embed_voice(speaker.vector.to(self._device), speaker.reference.to(self._device))
                for name, speaker in load_speakers(folder).items()
            }

    def open(self, *, seed: int, options: Mapping[str, Value]) -> Stream:
        voice = choose_speaker(self._voices, str(options.get("speaker", "")))
        return Stream(seed, voice, np.zeros(0, np.int32))

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Call[Stream]]) -> Sequence[Sequence[Packet]]:
        streams = [self._add(call) for call in batch]
        outputs: list[list[Packet]] = [[] for _ in batch]
        while windows := self._windows(batch, streams):
            for numbers in self._groups(windows):
                audio = self._decode([windows[number] for number in numbers])
                for number, samples in zip(numbers, audio, strict=True):
                    outputs[number].append(Packet({"audio": samples}))
        for call, stream in zip(batch, streams, strict=True):
            vars(call.state).update(vars(stream))
        return outputs

    # -- internals

    def _add(self, call: Call[Stream]) -> Stream:
        """Returns a copy of a stream with the codes of the call. Raises InvalidChunkError if they are invalid."""
        stream = replace(call.state)
        if call.packet is not None:
            codes = call.packet.tensors["codes"].astype(np.int32, copy=False)
            first_frame = stream.blocks * self._decoder.codes_in_block + len(stream.codes)
            check_codes(codes, first_frame, groups=1, size=self._decoder.codebook_size)
            stream.codes = np.concatenate((stream.codes, codes[:, 0]))
        return stream

    def _windows(self, batch: Sequence[Call[Stream]], streams: Sequence[Stream]) -> Mapping[int, _Window]:
        """Returns the next windows of the streams of a batch, by the number of the stream."""
        windows: dict[int, _Window] = {}
        in_block = self._decoder.codes_in_block
        for number, (call, stream) in enumerate(zip(batch, streams, strict=True)):
            is_last, codes = call.packet is None, len(stream.codes)
            if not is_last:
                codes -= codes % in_block
            kept = min(codes if is_last else codes - self._ahead, _MAX_BLOCKS * in_block)
            if kept > 0:
                windows[number] = _Window(stream, min(codes, kept + self._ahead), kept)
        return windows

    def _groups(self, windows: Mapping[int, _Window]) -> Iterator[Sequence[int]]:
        """Yields the numbers of the windows that are decoded together."""
        groups: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, window in windows.items():
            groups[window.shape].append(number)
        for (_, kept, _), numbers in groups.items():
            rows = max(1, _MAX_BLOCKS * self._decoder.codes_in_block // kept)
            yield from (numbers[start : start + rows] for start in range(0, len(numbers), rows))

    def _decode(self, windows: Sequence[_Window]) -> npt.NDArray[np.float32]:
        """Decodes windows of one shape, and moves their streams forward. Returns float32[rows, samples]."""
        streams, (_, codes, kept) = [window.stream for window in windows], windows[0]
        decoder, mel = self._decoder, self._solve(streams, codes, ceil(kept / self._decoder.codes_in_block))
        earlier = [stream.mel for stream in streams if stream.mel is not None]
        known = torch.cat((torch.stack(earlier), mel), 2) if earlier else mel
        first, frames = known.shape[2] - mel.shape[2], kept * decoder.block // decoder.codes_in_block
        samples = self._vocoder(known).view(len(streams), -1)
        for stream, row in zip(streams, known, strict=True):
            stream.codes, stream.blocks = stream.codes[kept:], stream.blocks + ceil(kept / decoder.codes_in_block)
            stream.mel = row[:, max(0, first + frames - self._context) : first + frames].clone()
        return samples[:, first * self._hop : (first + frames) * self._hop].numpy()  # type: ignore[no-any-return]

    def _solve(self, streams: Sequence[Stream], codes: int, kept_blocks: int) -> Tensor:
        """Returns the spectrograms of windows of `codes` codes, [rows, mel size, frames]."""
        decoder = self._decoder
        frames = codes * decoder.block // decoder.codes_in_block
        spans = [range(stream.blocks, stream.blocks + ceil(frames / decoder.block)) for stream in streams]
        noise = [
            draw_noise(stream.seed, blocks, block=decoder.block, size=decoder.mel_size)[:frames]
            for stream, blocks in zip(streams, spans, strict=True)
        ]
        numbers = np.stack([stream.codes[:codes] for stream in streams])
        past = [stream.past for stream in streams if stream.past is not None]
        mel, retained = decoder.solve(
            torch.from_numpy(np.stack(noise)).to(self._device),
            torch.from_numpy(numbers).to(self._device).long(),
            torch.stack([stream.voice for stream in streams]),
            torch.stack(past) if past else None,
            kept_blocks=kept_blocks,
        )
        for stream, values in zip(streams, retained, strict=True):
            stream.past = values.clone()
        return mel.transpose(1, 2)


def draw_noise(seed: int, blocks: range, *, block: int, size: int) -> npt.NDArray[np.float32]:
    """Returns the noise of blocks of `block` frames, float32[frames, size]. Each block depends only on its number."""
    keys = [np.array([seed, number], np.uint64) for number in blocks]
    generators = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
    return np.concatenate([generator.standard_normal((block, size), np.float32) for generator in generators])


def context_frames(vocoder: Qwen2_5OmniToken2WavBigVGANModel) -> int:
    """Returns the number of earlier frames, and of later ones, on which samples of BigVGAN depend."""
    config: Any = vocoder.config
    # An activation resamples by two filters of 12 values at twice the rate.
    activation, frames, rate = 6, 3.0, 1
    for stride, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        frames += ceil(kernel / stride) / rate
        rate *= stride
        frames += (
            max(
                sum((size - 1) // 2 * (dilation + 1) + 2 * activation for dilation in dilations)
                for size, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
            )
            / rate
        )
    return ceil(frames + (activation + 3) / rate)


def load_token2wav(model: Path, options: Mapping[str, JsonValue]) -> Token2Wav:
    """Loads the function from the checkpoint folder `model`. See `make_token2wav` for the errors."""
    parsed = parse_options(_Options, options, stage="")
    placement = choose_placement({"device": parsed.device, "dtype": "float32"})
    return Token2Wav(_load(model, placement.device), model, parsed)


def _load(folder: Path, device: torch.device) -> Qwen2_5OmniToken2WavModel:
    section = read_config(folder, model_type=MODEL_TYPE).get("token2wav_config")
    try:
        with no_init_weights():
            model = Qwen2_5OmniToken2WavModel(Qwen2_5OmniToken2WavConfig(**section))  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise load_error(folder, f"the token2wav_config in its config.json is invalid: {exc}") from exc
    fill_module(model, folder, prefix="token2wav.", what="token2wav", device=device)
    return model
