"""Reads the audio files of callers: their type, and the length and the loudness of their audio."""

import io
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.error import FFmpegError

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
_WAV_HEADER_BYTES = 8
_WAV_SLACK_BYTES = 64
_WAV_UNKNOWN_BYTES = 0x7FFF_0000


class Measured(NamedTuple):
    """The audio of a file, mixed to one channel."""

    media_type: str
    duration_s: float
    peak: float
    """The largest absolute value of a sample, at most 1."""


def find_media_type(data: bytes, *, param: str) -> str:
    """Returns the media type of an audio file by its content. Blocks for a short time.

    Raises ParameterError (INVALID_MEDIA) if it is not a file of a known format with audio.
    """
    with _opened(data, param) as container:
        return _media_type_of(container)


def measure(data: bytes, *, param: str, max_s: float | None = None) -> Measured:
    """Decodes an audio file, and measures its audio. Blocks. Stops when the audio exceeds `max_s` seconds.

    Raises ParameterError (INVALID_MEDIA) if it is not a file of a known format with audio, or is damaged.
    """
    _check_wav_size(data, param)
    samples, peak = 0, 0.0
    with _opened(data, param) as container:
        rate_hz = container.streams.audio[0].rate
        for fragment in _fragments(container):
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
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=stream.rate)
    # None flushes the resampler.
    for frame in chain(container.decode(stream), [None]):
        for resampled in resampler.resample(frame):
            yield resampled.to_ndarray()[0].astype(np.float32, copy=False)


@contextmanager
def _opened(data: bytes, param: str) -> Generator[InputContainer]:
    try:
        # FFmpeg would open the addresses that playlist formats list.
        with av.open(io.BytesIO(data), "r", options={"format_whitelist": ",".join(_MEDIA_TYPES)}) as container:
            if not container.streams.audio:
                raise _damaged(param, "it has no audio")
            yield container
    except FFmpegError as exc:
        raise _damaged(param, exc.strerror or str(exc)) from exc


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
