"""What a prompt may hold beside text."""

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
    """An encoded picture."""

    data: bytes
    media_type: str
    """For example "image/png"."""


@dataclass(frozen=True)
class AudioFile:
    """An encoded sound."""

    data: bytes
    media_type: str
    """For example "audio/wav"."""


@dataclass(frozen=True)
class VideoFile:
    """An encoded film."""

    data: bytes
    media_type: str
    """For example "video/mp4"."""


@dataclass(frozen=True, eq=False)
class Sound:
    """Sound as samples: float32 in [-1, 1], [samples] or [samples, channels]."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


Part: TypeAlias = str | ImageFile | AudioFile | VideoFile | Sound
"""A piece of a prompt or of a message."""
Content: TypeAlias = str | Sequence[Part]
"""Text, or text and media in their order."""

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
    """A file, as what its name says it is; raises InvalidRequestError for other names, and for what cannot be read."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidRequestError(
            f"{path} is no picture, sound or film by its name; those end in {', '.join(_SUFFIXES)}",
            reason="INVALID_MEDIA",
        )
    kind, media_type = _SUFFIXES[path.suffix.lower()]
    try:
        return kind(path.read_bytes(), media_type)
    except OSError as exc:
        raise InvalidRequestError(f"cannot read {path}: {exc.strerror}", reason="INVALID_MEDIA") from exc


def message_to_wire(role: str, content: Content) -> request_pb2.Message:
    """A turn of a conversation as the contract has it."""
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
        case Sound():
            samples = inline_tensor("samples", np.asarray(part.samples, np.float32))
            return request_pb2.Part(audio=request_pb2.Audio(samples=samples, sample_rate_hz=part.sample_rate_hz))
