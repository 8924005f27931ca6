"""The suffixes of the names of media files."""

from collections.abc import Mapping

_SUFFIXES: Mapping[str, str] = {
    "application/octet-stream": ".bin",
    "audio/aac": ".aac",
    "audio/flac": ".flac",
    "audio/mp4": ".m4a",
    "audio/mpeg": ".mp3",
    "audio/ogg": ".ogg",
    "audio/wav": ".wav",
    "audio/webm": ".webm",
    "image/bmp": ".bmp",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-matroska": ".mkv",
    "video/x-msvideo": ".avi",
}


def suffix_of(media_type: str) -> str:
    """Returns the suffix of names of files of a media type, for example ".png", or "" if the type is not known."""
    return _SUFFIXES.get(media_type, "")
