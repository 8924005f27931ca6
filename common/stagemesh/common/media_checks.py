"""The comparison of a media file with its description."""

from typing import Protocol

from stagemesh.common.errors import InvalidRequestError


class FileDescription(Protocol):
    """The stated properties of a file, for example by `MediaFile` of request.proto."""

    @property
    def uri(self) -> str:
        """The URI of the file, or empty if it has none."""
        ...

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes, or 0 if it is not known."""
        ...

    @property
    def sha256(self) -> bytes:
        """The SHA-256 digest of the file, 32 bytes, or empty if it is not known."""
        ...


def check_content(stated: FileDescription, *, size_bytes: int, sha256: bytes) -> None:
    """Compares the size of a file in bytes and its SHA-256 digest with those in `stated`, as far as they are known.

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
