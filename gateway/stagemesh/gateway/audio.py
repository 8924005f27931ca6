"""The audio of callers: the type, length and loudness of their files, and the formats in which answers are encoded."""

import io
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError

from stagemesh.client import AudioChunk
from stagemesh.common.media.decoding import DecodedBytes, decode_audio, find_audio, open_container
from stagemesh.common.media.encodings import PCM, AudioEncoder
from stagemesh.gateway.errors import ParameterError

_MEDIA_TYPES: Mapping[str, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "aac": "audio/aac",
    "mp4": "audio/mp4",
    "matroska": "audio/webm",
}
"""The media types of audio files by the name of FFmpeg's format."""
FORMATS = "wav, mp3, flac, ogg, aac, mp4 or webm"
MAX_DECODED_BYTES = 1 << 30
"""The limit for the decoded audio of one request, all channels as float32: 93 minutes of one channel at 48 kHz."""


class Measured(NamedTuple):
    """The audio of a file, mixed to one channel."""

    media_type: str
    duration_s: float
    peak: float
    """The largest absolute value of a sample, at most 1."""


def decoding_budget() -> DecodedBytes:
    """Returns the budget of one request for decoded audio."""
    return DecodedBytes(MAX_DECODED_BYTES, remedy="omit response_format verbose_json, which needs the audio's length")


def find_media_type(data: bytes, *, param: str) -> str:
    """Returns the media type of an audio file by its content. Blocks for a short time.

    Raises ParameterError (INVALID_MEDIA) if it is not a file of a known format with audio.
    """
    with _opened(data, param) as container:
        return _media_type_of(container)


def measure(data: bytes, *, param: str, max_s: float | None = None, decoded: DecodedBytes | None = None) -> Measured:
    """Decodes an audio file, and measures its audio. Blocks. Stops when the audio exceeds `max_s` seconds.

    Adds the size of all channels to `decoded`, or to a new budget. Raises ParameterError (INVALID_MEDIA) if it is not a
    file of a known format with audio, or is damaged, and the errors of `DecodedBytes.add`.
    """
    samples, peak = 0, 0.0
    with _opened(data, param) as container:
        rate_hz = container.streams.audio[0].rate
        for block in decode_audio(container, decoded or decoding_budget()):
            if not np.isfinite(block).all():
                raise _damaged(param, "not all of its samples are finite")
            samples, peak = samples + len(block), max(peak, float(np.abs(block).max(initial=0.0)))
            if max_s is not None and samples > max_s * rate_hz:
                break
        if not samples:
            raise _damaged(param, "it has no samples")
        return Measured(_media_type_of(container), samples / rate_hz, peak)


@contextmanager
def _opened(data: bytes, param: str) -> Generator[InputContainer]:
    try:
        with open_container(io.BytesIO(data), list(_MEDIA_TYPES)) as container:
            find_audio(container)
            yield container
    except (FFmpegError, ValueError) as exc:
        raise _damaged(param, getattr(exc, "strerror", None) or str(exc)) from exc


def _media_type_of(container: InputContainer) -> str:
    # FFmpeg names some formats by several names.
    names = container.format.name.split(",")
    return next(media_type for name, media_type in _MEDIA_TYPES.items() if name in names)


def _damaged(param: str, cause: str) -> ParameterError:
    return ParameterError(param, f"it is not audio in {FORMATS}: {cause}", reason="INVALID_MEDIA")


AudioFormat: TypeAlias = Literal["wav", "mp3", "flac", "opus", "aac", "pcm", "pcm16"]

MEDIA_TYPES: Mapping[AudioFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": PCM,
    "pcm16": PCM,
}
PCM_RATE_HZ = 24_000
"""The number of samples per second of pcm and pcm16, which OpenAI's clients assume."""


class AnswerEncoder:
    """An encoder of the audio of one answer, in parts, which depend on how the audio is divided.

    A file has the sample rate of the audio. PCM has the rate that clients assume, and one channel.
    """

    def __init__(self, audio_format: AudioFormat) -> None:
        self._media_type = MEDIA_TYPES[audio_format]
        self._is_pcm = self._media_type == PCM
        self._encoder: AudioEncoder | None = None

    def push(self, chunk: AudioChunk) -> bytes:
        """Returns the bytes that are complete after a chunk."""
        if self._encoder is None:
            rates_hz = [PCM_RATE_HZ] if self._is_pcm else []
            self._encoder = AudioEncoder(self._media_type, sample_rate_hz=chunk.sample_rate_hz, rates_hz=rates_hz)
        is_mixed = self._is_pcm and chunk.samples.ndim > 1
        return bytes(self._encoder.push(chunk.samples.mean(axis=1) if is_mixed else chunk.samples))

    def finish(self) -> bytes:
        """Returns the remaining bytes. Called once, after the last chunk."""
        return b"" if self._encoder is None else bytes(self._encoder.finish())
