"""The roots of stored media: the locations that services may read and write, and the URIs of the objects in them.

A URI is a protocol of fsspec and a path, for example "s3://bucket/key" or "file:///folder/file". Nothing in it is
percent-encoded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from stagemesh.common.errors import PermissionDeniedError
from stagemesh.common.process.config import ClientServiceConfig

LOCAL = "file"
"""The protocol of files in folders."""
_MAX_URI_LENGTH = 2048
_EXACT = frozenset({LOCAL, "memory", "s3", "s3a", "gs", "gcs", "az", "abfs"})
"""The protocols whose libraries request exactly the path of a URI. Others may decode, cut or normalize a path."""
_UNCHANGED = re.compile(r"[\w.~+,=:/\[\]-]*", re.ASCII)
"""The paths that no library decodes, cuts or normalizes, if none of their names is empty, "." or ".."."""
_WRAPPERS = re.compile("async.*|(block|file|simple)cache|cached|data|dir|generic|libarchive|local|reference|tar|zip")
"""The protocols of fsspec that read files of other file systems, without the checks of those."""


class Location(NamedTuple):
    """A URI in two parts. The path of a local file is absolute. Other paths begin with the bucket or the host."""

    protocol: str
    path: str

    @property
    def uri(self) -> str:
        return f"{self.protocol}://{self.path}"

    def contains(self, other: "Location") -> bool:
        """Returns whether `other` is an object below this root."""
        return self.protocol == other.protocol and other.path.startswith(f"{self.path.rstrip('/')}/")


@dataclass(frozen=True)
class MediaConfig:
    """The object store of a pipeline and the other locations to which requests may refer."""

    store: str = ""
    """The root below which outputs and uploads are stored. Requests may refer to it, too. Empty if there is none."""
    allowed: tuple[str, ...] = ()
    """Further roots to which requests may refer. Nothing is written there."""
    storage_options: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict[str, Mapping[str, JsonValue]])
    """The arguments of fsspec's file systems, by protocol."""
    max_file_bytes: int = 1 << 30
    """The maximum size in bytes of a file that is uploaded, or to which a request refers."""
    max_uploads: int = 1000
    """The maximum number of files that a caller has uploaded and that are still stored."""
    max_upload_bytes: int = 64 << 30
    """The maximum size of these files in bytes. Several media services that count at the same time may exceed both."""
    keep_uploads_s: float = 604_800.0
    """The time in seconds for which an uploaded file is stored."""

    def __post_init__(self) -> None:
        for root in self.roots:
            parse_root(root)

    @property
    def roots(self) -> tuple[str, ...]:
        """The roots to which requests may refer."""
        return (self.store, *self.allowed) if self.store else self.allowed

    def uri_of(self, *names: str) -> str:
        """Returns the URI of an object in the store. `names` are the names of its folders, and its own name.

        Raises PermissionDeniedError (REFERENCE_NOT_ALLOWED) if the object would be outside the store.
        """
        return self.located(f"{parse_root(self.store).uri.rstrip('/')}/{'/'.join(names)}").uri

    def located(self, uri: str) -> Location:
        """Returns the location of an object to which a request refers.

        Raises PermissionDeniedError (REFERENCE_NOT_ALLOWED) if no root contains it, or if the URI is malformed. Does
        not follow symbolic links, which the store does when it opens the object.
        """
        protocol, separator, path = uri.partition("://")
        roots = list(map(parse_root, self.roots))
        problem = ""
        if len(uri) > _MAX_URI_LENGTH or not uri.isprintable():
            problem = f"is longer than {_MAX_URI_LENGTH} characters, or contains unprintable ones"
        elif not separator or {"", ".", ".."}.intersection(path.removeprefix("/").split("/")):
            problem = "is not of the form protocol://path without empty names, '.' and '..'"
        elif not _is_exact(protocol, path):
            problem = f"has a character other than letters, digits and ._~+,=:[]- of ASCII, which {protocol} may decode"
        elif not any(root.contains(Location(protocol, path)) for root in roots):
            problem = f"is outside the allowed roots: {', '.join(root.uri for root in roots) or 'none'}"
        if problem:
            raise PermissionDeniedError(
                f"the reference {uri[:200]!r} {problem}; upload the file, or refer to an object below an allowed root",
                reason="REFERENCE_NOT_ALLOWED",
            )
        return Location(protocol, path)


@dataclass(frozen=True)
class MediaServiceConfig(ClientServiceConfig):
    """The configuration of a process that serves MediaService for one pipeline."""

    pipeline: str
    listen: str
    """The address on which the process listens, as "host:port"."""
    media: MediaConfig
    name: str = "media"
    """The name of the process. Processes with the same store need different names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.media.store:
            raise ValueError("media.store is not set; name the folder or the URL in which uploads are stored")


def parse_root(root: str) -> Location:
    """Returns the location of a root that an operator wrote: an absolute folder, or a URL of fsspec.

    Raises ValueError if it is neither.
    """
    protocol, separator, path = root.partition("://")
    if not separator:
        protocol, path = LOCAL, str(Path(root).expanduser())
    stripped = path.rstrip("/")
    names = stripped.removeprefix("/").split("/")
    is_path = not {"", ".", ".."}.intersection(names) and (protocol == LOCAL) == path.startswith("/")
    if not is_path or not protocol.isalnum() or _WRAPPERS.fullmatch(protocol) or not _is_exact(protocol, path):
        raise ValueError(f"{root!r} is not a location; write an absolute folder, or a URL such as s3://bucket/prefix")
    return Location(protocol, stripped)


def _is_exact(protocol: str, path: str) -> bool:
    """Returns whether the library of a protocol requests exactly this path."""
    return protocol in _EXACT or _UNCHANGED.fullmatch(path) is not None
