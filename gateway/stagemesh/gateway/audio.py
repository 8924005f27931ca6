"""The audio of callers: the type, length and loudness of their files, and the formats in which answers are encoded."""

import io
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.error import FFmpegError

from stagemesh.client import AudioChunk
from stagemesh.common.media.decoding import DecodedBytes, check_codec, open_container
from stagemesh.common.media.encodings import AudioEncoder
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
"""The limit for decoded audio of one request, mixed to one channel of float32: 93 minutes at 48 kHz."""
_BLOCK_SAMPLES = 1 << 16
_WAV_HEADER_BYTES = 8
_WAV_SLACK_BYTES = 64
_WAV_UNKNOWN_BYTES = 0x7FFF_0000


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

    Adds the size of the audio to `decoded`, or to a new budget. Raises ParameterError (INVALID_MEDIA) if it is not a
    file of a known format with audio, or is damaged, and the errors of `DecodedBytes.add`.
    """
    _check_wav_size(data, param)
    samples, peak, decoded = 0, 0.0, decoded or decoding_budget()
    with _opened(data, param) as container:
        rate_hz = container.streams.audio[0].rate
        for fragment in _fragments(container):
            decoded.add(fragment.nbytes, "audio")
            if not np.isfinite(fragment).all():
                raise _damaged(param, "not all of its samples are finite")
            samples, peak = samples + len(fragment), max(peak, float(np.abs(fragment).max(initial=0.0)))
            if max_s is not None and samples > max_s * rate_hz:
                break
        if not samples:
            raise _damaged(param, "it has no samples")
        return Measured(_media_type_of(container), samples / rate_hz, peak)


def _fragments(container: InputContainer) -> Iterator[npt.NDArray[np.float32]]:
    stream = container.streams.audio[0]
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=stream.rate, frame_size=_BLOCK_SAMPLES)
    # None flushes the resampler.
    for frame in chain(container.decode(stream), [None]):
        for resampled in resampler.resample(frame):
            yield resampled.to_ndarray()[0].astype(np.float32, copy=False)


@contextmanager
def _opened(data: bytes, param: str) -> Generator[InputContainer]:
    try:
        with open_container(io.BytesIO(data), list(_MEDIA_TYPES)) as container:
            if not container.streams.audio:
                raise _damaged(param, "it has no audio")
            check_codec(container.streams.audio[0])
            yield container
    except (FFmpegError, ValueError) as exc:
        raise _damaged(param, getattr(exc, "strerror", None) or str(exc)) from exc


def _media_type_of(container: InputContainer) -> str:
    # FFmpeg names some formats by several names.
    names = container.format.name.split(",")
    return next(media_type for name, media_type in _MEDIA_TYPES.items() if name in names)


def _check_wav_size(data: bytes, param: str) -> None:
    """Raises ParameterError if a WAV file is shorter than its header says. FFmpeg would decode only the rest.

    Ignores the huge size in the header of a file that was written to a pipe, and small errors of encoders.
    """
    size_bytes = int.from_bytes(data[4:_WAV_HEADER_BYTES], "little") + _WAV_HEADER_BYTES
    if data[:4] == b"RIFF" and len(data) + _WAV_SLACK_BYTES < size_bytes < _WAV_UNKNOWN_BYTES:
        raise _damaged(param, f"it ends after {len(data)} of {size_bytes} bytes")


def _damaged(param: str, cause: str) -> ParameterError:
    return ParameterError(param, f"it is not audio in {FORMATS}: {cause}", reason="INVALID_MEDIA")


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


def make_encoder(audio_format: AudioFormat) -> "_FileEncoder | _PcmEncoder":
    """Returns an encoder of a format.

    It converts the audio of one answer to a file, in parts. The parts depend on how the audio is divided. `push`
    returns the bytes that are complete after a chunk. `finish` returns the remaining bytes. It is called once, after
    the last chunk.
    """
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
