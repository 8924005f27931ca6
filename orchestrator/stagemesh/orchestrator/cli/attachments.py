"""The files that `stagemesh generate --attach` adds to a request: in the message, uploaded, or by reference."""

import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from stagemesh.client import Client, MediaFile, Medium, read_media
from stagemesh.client.content import media_type_of

_MAX_INLINE_BYTES = 6 << 20
"""The maximum size of all files within a request. A request may have 8 MiB."""


def read_attachments(names: Sequence[str], *, endpoints: Sequence[str], quiet: bool) -> list[Medium]:
    """Returns the media of a request, in order. Uploads a file if the request would become too large with it.

    A name that contains "://" is the URI of a stored file. Prints the progress of uploads to stderr unless `quiet`.
    Raises InvalidRequestError if a file cannot be read or has an unknown suffix, and the errors of `Client.upload`.
    """
    media, inline_bytes = list[Medium](), 0
    for name in names:
        size_bytes = _size_bytes(name)
        if "://" in name:
            media.append(MediaFile(name, media_type_of(PurePosixPath(name))))
        elif inline_bytes + size_bytes <= _MAX_INLINE_BYTES:
            media.append(read_media(name))
            inline_bytes += size_bytes
        else:
            media.append(_upload(name, size_bytes, endpoints=endpoints, quiet=quiet))
    return media


def _size_bytes(name: str) -> int:
    path = Path(name)
    # The client reports a file that does not exist.
    return path.stat().st_size if path.is_file() else 0


def _upload(name: str, size_bytes: int, *, endpoints: Sequence[str], quiet: bool) -> MediaFile:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("uploading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(file=sys.stderr)
    with Client(*endpoints) as client, Progress(*columns, console=console, disable=quiet, transient=True) as progress:
        task = progress.add_task(Path(name).name, total=size_bytes)
        return client.upload(name, on_bytes=lambda sent: progress.update(task, completed=sent))
