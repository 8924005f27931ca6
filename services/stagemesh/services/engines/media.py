"""The media in a message: images, audio and videos."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagemesh.common.tensors import Array

MediaKind: TypeAlias = Literal["image", "audio", "video"]

MEDIA_TYPES: Mapping[MediaKind, Mapping[str, str]] = {
    "image": {
        "image/png": "PNG",
        "image/jpeg": "JPEG",
        "image/webp": "WEBP",
        "image/gif": "GIF",
        "image/bmp": "BMP",
    },
    "audio": {
        "audio/wav": "wav",
        "audio/x-wav": "wav",
        "audio/mpeg": "mp3",
        "audio/flac": "flac",
        "audio/x-flac": "flac",
        "audio/ogg": "ogg",
        "audio/aac": "aac",
        "audio/mp4": "mp4",
        "audio/x-m4a": "mp4",
        "audio/webm": "matroska",
    },
    "video": {
        "video/mp4": "mp4",
        "video/quicktime": "mov",
        "video/webm": "matroska",
        "video/x-matroska": "matroska",
        "video/x-msvideo": "avi",
        "image/gif": "gif",
    },
}
"""The supported media types of each kind, with the format names that Pillow (images) and FFmpeg (others) use."""


@dataclass(frozen=True)
class MediaFile:
    """An encoded image, audio or video file."""

    kind: MediaKind
    data: bytes
    media_type: str


@dataclass(frozen=True, eq=False)
class Samples:
    """Decoded audio: float32[samples] or float32[samples, channels], with values in [-1, 1]."""

    samples: Array
    sample_rate_hz: int

    @property
    def kind(self) -> MediaKind:
        """The kind of medium, always "audio"."""
        return "audio"


Medium: TypeAlias = MediaFile | Samples
Part: TypeAlias = str | Medium
"""One part of a message: text, a media file or audio samples."""
