"""The media that a prompt can contain in addition to text: images, audio and video."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import inline_tensor
from stagemesh.v1 import request_pb2


@dataclass(frozen=True)
class ImageFile:
    """An encoded image, for example the content of a PNG file."""

    data: bytes
    media_type: str
    """The media type, for example "image/png"."""


@dataclass(frozen=True)
class AudioFile:
    """Encoded audio, for example the content of a WAV file."""

    data: bytes
    media_type: str
    """The media type, for example "audio/wav"."""


@dataclass(frozen=True)
class VideoFile:
    """An encoded video, for example the content of an MP4 file."""

    data: bytes
    media_type: str
    """The media type, for example "video/mp4"."""


@dataclass(frozen=True, eq=False)
class AudioSamples:
    """Audio that is not encoded: float32 samples in [-1, 1], with shape [samples] or [samples, channels]."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


Part: TypeAlias = str | ImageFile | AudioFile | VideoFile | AudioSamples
"""One part of a prompt or of a message: text, an image, audio or a video."""
Content: TypeAlias = str | Sequence[Part]
"""Text, or a sequence of text and media in the order in which the model reads them."""

_FileKind: TypeAlias = type[ImageFile] | type[AudioFile] | type[VideoFile]
_SUFFIXES: Mapping[str, tuple[_FileKind, str]] = {
    ".png": (ImageFile, "image/png"),
    ".jpg": (ImageFile, "image/jpeg"),
    ".jpeg": (ImageFile, "image/jpeg"),
    ".webp": (ImageFile, "image/webp"),
    ".gif": (ImageFile, "image/gif"),
    ".bmp": (ImageFile, "image/bmp"),
    ".wav": (AudioFile, "audio/wav"),
    ".mp3": (AudioFile, "audio/mpeg"),
    ".flac": (AudioFile, "audio/flac"),
    ".ogg": (AudioFile, "audio/ogg"),
    ".aac": (AudioFile, "audio/aac"),
    ".m4a": (AudioFile, "audio/mp4"),
    ".mp4": (VideoFile, "video/mp4"),
    ".mov": (VideoFile, "video/quicktime"),
    ".webm": (VideoFile, "video/webm"),
    ".mkv": (VideoFile, "video/x-matroska"),
    ".avi": (VideoFile, "video/x-msvideo"),
}


def read_media(path: Path | str) -> ImageFile | AudioFile | VideoFile:
    """Reads an image, audio or video file. The suffix of the file's name determines the kind and the media type.

    Raises InvalidRequestError (INVALID_MEDIA) if the suffix is unknown or the file cannot be read.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidRequestError(
            f"{path} has none of the suffixes of images, audio and video: {', '.join(_SUFFIXES)}",
            reason="INVALID_MEDIA",
        )
    kind, media_type = _SUFFIXES[path.suffix.lower()]
    try:
        return kind(path.read_bytes(), media_type)
    except OSError as exc:
        raise InvalidRequestError(f"cannot read {path}: {exc.strerror}", reason="INVALID_MEDIA") from exc


def message_to_wire(role: str, content: Content) -> request_pb2.Message:
    """Returns one turn of a conversation as a protobuf message."""
    if isinstance(content, str):
        return request_pb2.Message(role=role, content=content)
    return request_pb2.Message(role=role, parts=[_part(part) for part in content])


def _part(part: Part) -> request_pb2.Part:
    match part:
        case str():
            return request_pb2.Part(text=part)
        case ImageFile():
            return request_pb2.Part(image=request_pb2.Image(data=part.data, media_type=part.media_type))
        case AudioFile():
            return request_pb2.Part(audio_file=request_pb2.MediaFile(data=part.data, media_type=part.media_type))
        case VideoFile():
            return request_pb2.Part(video_file=request_pb2.MediaFile(data=part.data, media_type=part.media_type))
        case AudioSamples():
            samples = inline_tensor("samples", np.asarray(part.samples, np.float32))
            return request_pb2.Part(audio=request_pb2.Audio(samples=samples, sample_rate_hz=part.sample_rate_hz))
