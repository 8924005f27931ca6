"""The stage codec_decoder, which converts codec frames to audio: the decoder of the checkpoint's speech tokenizer.
Decodes the frames of a reference voice before the frames of the speech.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, JsonValue, PositiveInt
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.wire.tensors import Array, Tensors, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call, OpensWithout, Saves
from stagemesh.services.models.checkpoint import load_weights, read_config, read_section, require_folder
from stagemesh.services.models.codec_speech.streaming import (
    BatchState,
    CausalConv,
    DecoderConfig,
    WaveDecoder,
    WindowTransformer,
)
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, FrameDecoder, VocoderState, choose_placement
from stagemesh.services.models.codec_speech.weights import Weights
from stagemesh.services.models.qwen3_tts import CODEC_FOLDER, CODEC_TYPE

_PART = "decoder"
_KERNEL = 3
_FEWEST_USES = 1e-5
"""The least usage of a code. The mean vector of a code that is never used would be infinite otherwise."""


@dataclass(frozen=True)
class CodecDecoderConfig(DecoderConfig):
    """The part `decoder_config` of a speech tokenizer's config."""

    codebook_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 512
    latent_dim: PositiveInt = 1024
    num_quantizers: Annotated[int, Field(ge=2)] = 16


class CodecDecoder(FrameDecoder):
    """A decoder of codec frames with the weights of Qwen3-TTS's speech tokenizer."""

    def __init__(self, weights: Weights, config: CodecDecoderConfig, *, device: torch.device) -> None:
        width, latent = config.hidden_size, config.latent_dim
        super().__init__(WaveDecoder(weights, config, inputs=latent, cut_start=False), config, device=device)
        quantizer = weights.part("quantizer")
        first = _take_codebooks(quantizer.part("rvq_first"), config, groups=1)
        rest = _take_codebooks(quantizer.part("rvq_rest"), config, groups=self.groups - 1)
        self._embedding = weights.place(torch.cat((first, rest)))
        self._mix = CausalConv(weights.part("pre_conv"), config.codebook_dim, latent, kernel=_KERNEL)
        transformer = weights.part("pre_transformer")
        self._enter = transformer.part("input_proj").place_linear(latent, width)
        self._transformer = WindowTransformer(transformer, config)
        self._leave = transformer.part("output_proj").place_linear(width, latent)
        self.reach = _KERNEL - 1 + self._transformer.reach + self._waves.reach

    def _transform(self, codes: Tensor, batch: BatchState) -> Tensor:
        mixed = self._mix(self._embed(codes, mode="sum").transpose(1, 2), batch).transpose(1, 2)
        return F.linear(self._transformer(F.linear(mixed, *self._enter), batch), *self._leave)


def _take_codebooks(weights: Weights, config: CodecDecoderConfig, *, groups: int) -> Tensor:
    """Returns the vectors of a quantizer's codes after its output projection, [groups * codebook size, codebook_dim].

    A checkpoint stores the sum of the vectors that were assigned to a code, and their number.
    """
    width, inner = config.codebook_dim, config.codebook_dim // 2
    weights.take("input_proj.weight", inner, width, 1)  # used for training only
    vectors: list[Tensor] = []
    for group in range(groups):
        codebook = weights.part(f"vq.layers.{group}._codebook")
        usage = codebook.take("cluster_usage", config.codebook_size).clamp(min=_FEWEST_USES)
        vectors.append(codebook.take("embedding_sum", config.codebook_size, inner) / usage[:, None])
    return F.linear(torch.cat(vectors), weights.take("output_proj.weight", width, inner, 1).squeeze(2))


def make_codec_decoder(model: Path | None, options: Mapping[str, JsonValue]) -> CodecVocoder:
    """Loads the function `qwen3_tts.codec_decoder` from the checkpoint folder `model`.

    Raises InvalidRequestError if `model` is None or an option is invalid, and NotReadyError (LOAD_FAILED) if the
    checkpoint's speech tokenizer is incomplete or of another type.
    """
    folder = require_folder(model, "function qwen3_tts.codec_decoder") / CODEC_FOLDER
    placement = choose_placement(options)
    config = read_config(folder, model_type=CODEC_TYPE)
    section = read_section(folder, config, name="decoder_config", kind=CodecDecoderConfig)
    weights = Weights(load_weights(folder, f"{_PART}."), device=placement.device, dtype=placement.dtype)
    decoder = CodecDecoder(weights.part(_PART), section, device=placement.device)
    weights.check(f"the codec decoder in {folder}")
    return CodecVocoder(decoder)


_REFERENCE, _CODES = "reference_codes", "codes"
_EARLY = "early"
"""The name of the saved tensor that contains the frames before the reference."""


@dataclass
class CloneState:
    """The state of one stream."""

    decoded: VocoderState
    early: list[Array] | None
    """The frames of the speech that have arrived before the reference. None as soon as the reference has arrived."""


class CloneVocoder(OpensWithout[CloneState], Saves[CloneState]):
    """A `Function` that converts codec frames to audio.

    The frames of a request's reference voice, of which there may be none, arrive over an edge of their own, before or
    after the first frames of the speech. They are decoded first, and their samples are dropped.
    """

    def __init__(self, vocoder: CodecVocoder) -> None:
        self._vocoder = vocoder

    def open(self, *, seed: int, options: Mapping[str, Value]) -> CloneState:
        return self.open_without(frozenset(), seed=seed, options=options)

    def open_without(self, absent: frozenset[str], *, seed: int, options: Mapping[str, Value]) -> CloneState:
        return CloneState(self._vocoder.open(seed=seed, options=options), None if _REFERENCE in absent else [])

    def save(self, state: CloneState) -> Tensors:
        saved = dict(self._vocoder.save(state.decoded))
        if state.early is not None:
            saved[_EARLY] = np.concatenate(state.early) if state.early else np.empty((0, 0), np.int32)
        return saved

    def restore(self, tensors: Tensors, *, seed: int, options: Mapping[str, Value]) -> CloneState:
        early = tensors.get(_EARLY)
        decoded = self._vocoder.restore(tensors, seed=seed, options=options)
        return CloneState(decoded, None if early is None else [early.astype(np.int32)] if len(early) else [])

    def __call__(self, batch: Sequence[Call[CloneState]]) -> Sequence[Sequence[Packet]]:
        packets = [_frames_to_decode(call) for call in batch]
        calls = [Call(call.state.decoded, packet) for call, packet in zip(batch, packets, strict=True)]
        outputs = [_spoken(call, made) for call, made in zip(batch, self._vocoder(calls), strict=True)]
        # States change only after the vocoder has accepted all frames of the batch.
        for call in batch:
            _keep_early_frames(call)
        return outputs


def make_clone_vocoder(model: Path | None, options: Mapping[str, JsonValue]) -> CloneVocoder:
    """Loads the function `qwen3_tts.codec_decoder`. The errors are those of `make_codec_decoder`."""
    return CloneVocoder(make_codec_decoder(model, options))


def _frames_to_decode(call: Call[CloneState]) -> Packet | None:
    """Returns the frames that the vocoder decodes in a call, or None if it decodes none.

    Raises InvalidChunkError if the stream ends without its reference.
    """
    early, packet = call.state.early, call.packet
    if packet is None:
        if early:
            raise InvalidChunkError(f"the edges ended without {_REFERENCE}, which may have no frames")
        return None
    if _REFERENCE in packet.tensors:
        return Packet({_CODES: np.concatenate([packet.tensors[_REFERENCE], *(early or [])])})
    return packet if early is None else None


def _spoken(call: Call[CloneState], made: Sequence[Packet]) -> Sequence[Packet]:
    """Returns the decoded packets without the samples of the reference. Each frame has equally many samples."""
    reference = () if call.packet is None else call.packet.tensors.get(_REFERENCE, ())
    if not len(reference):
        return made
    audio = np.concatenate([packet.tensors["audio"] for packet in made])
    frames = len(reference) + sum(map(len, call.state.early or []))
    spoken = audio[len(audio) // frames * len(reference) :]
    return [Packet({"audio": spoken})] if len(spoken) else []


def _keep_early_frames(call: Call[CloneState]) -> None:
    if call.packet is None or call.state.early is None:
        return
    if _REFERENCE in call.packet.tensors:
        call.state.early = None
    else:
        # A copy, because the packet holds memory of its producer.
        call.state.early.append(np.array(call.packet.tensors[_CODES], np.int32))
