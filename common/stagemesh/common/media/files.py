"""Media files: the suffixes of their names, and their comparison with descriptions."""

from collections.abc import Mapping

from stagemesh.common.errors import InvalidRequestError
from stagemesh.v1 import request_pb2

SUFFIXES: Mapping[str, str] = {
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
    "text/plain": ".txt",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-matroska": ".mkv",
    "video/x-msvideo": ".avi",
}
"""The suffix of names of files by their media type."""


def suffix_of(media_type: str) -> str:
    """Returns the suffix of names of files of a media type, for example ".png", or "" if the type is not known."""
    return SUFFIXES.get(media_type, "")


def check_content(stated: request_pb2.MediaFile, *, size_bytes: int, sha256: bytes) -> None:
    """Compares the size of a file in bytes and its SHA-256 digest with those in `stated`, if they are set.

    Raises InvalidRequestError (MEDIA_MISMATCH) if they differ.
    """
    problem = ""
    if stated.size_bytes and stated.size_bytes != size_bytes:
        problem = f"has {size_bytes} bytes, but its size_bytes is {stated.size_bytes}"
    elif stated.sha256 and stated.sha256 != sha256:
        problem = f"has the SHA-256 digest {sha256.hex()}, but its sha256 is {stated.sha256.hex()[:64]}"
    if problem:
        raise InvalidRequestError(
            f"{stated.uri or 'the file'} {problem}; transfer the file again, or correct its description",
            reason="MEDIA_MISMATCH",
        )


MEDIA_PART_BYTES = 1 << 20  # the limit for the bytes of a file in one message
