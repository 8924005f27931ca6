"""The function codec_decoder, which decodes the frames of a reference voice before those of the speech after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Tensors
from stagemesh.common.typed_values import Value
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.function.base import Call, OpensWithout, Saves
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, VocoderState
from stagemesh.services.models.qwen3_tts.codec_decoder import make_codec_decoder

Codes: TypeAlias = npt.NDArray[np.int32]
_REFERENCE, _CODES = "reference_codes", "codes"
_EARLY = "early"
"""The name of the saved tensor that contains the frames before the reference."""


@dataclass
class CloneState:
    """The state of one stream."""

    decoded: VocoderState
    early: list[Codes] | None
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
