"""The formats of audio that clients may request, and the encoders for them."""

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

import av
import numpy as np

from stagemesh.client import AudioChunk
from stagemesh.common.media_encoders import AudioEncoder

AudioFormat: TypeAlias = Literal["wav", "mp3", "flac", "opus", "aac", "pcm", "pcm16"]

MEDIA_TYPES: Mapping[AudioFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
PCM_RATE_HZ = 24_000
"""The number of samples per second of pcm and pcm16, which OpenAI's clients assume."""


class Encoder(Protocol):
    """Converts the audio of one answer to a file, in parts. The parts depend on how the audio is divided."""

    def push(self, chunk: AudioChunk) -> bytes:
        """Returns the bytes that are complete after a chunk."""
        ...

    def finish(self) -> bytes:
        """Returns the remaining bytes. Called once, after the last chunk."""
        ...


def make_encoder(audio_format: AudioFormat) -> Encoder:
    """Returns an encoder of a format."""
    return _PcmEncoder() if audio_format in {"pcm", "pcm16"} else _FileEncoder(MEDIA_TYPES[audio_format])


class _FileEncoder:
    """An encoder of files with the sample rate of the audio."""

    def __init__(self, media_type: str) -> None:
        self._media_type = media_type
        self._encoder: AudioEncoder | None = None

    def push(self, chunk: AudioChunk) -> bytes:
        if self._encoder is None:
            self._encoder = AudioEncoder(self._media_type, sample_rate_hz=chunk.sample_rate_hz)
        return bytes(self._encoder.push(chunk.samples))

    def finish(self) -> bytes:
        return b"" if self._encoder is None else bytes(self._encoder.finish())


class _PcmEncoder:
    """An encoder of signed 16-bit samples in one channel, at the rate that clients assume."""

    def __init__(self) -> None:
        self._resampler = av.AudioResampler(format="s16", layout="mono", rate=PCM_RATE_HZ)

    def push(self, chunk: AudioChunk) -> bytes:
        samples = chunk.samples if chunk.samples.ndim == 1 else chunk.samples.mean(axis=1)
        plane = np.ascontiguousarray(samples[None].clip(-1, 1), np.float32)
        frame = av.AudioFrame.from_ndarray(plane, format="fltp", layout="mono")
        frame.sample_rate = chunk.sample_rate_hz
        return self._converted(frame)

    def finish(self) -> bytes:
        return self._converted(None)

    def _converted(self, frame: av.AudioFrame | None) -> bytes:
        return b"".join(each.to_ndarray().tobytes() for each in self._resampler.resample(frame))
