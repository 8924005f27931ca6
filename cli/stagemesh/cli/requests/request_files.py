"""The files of a request: attached media, and the JSON files of messages and tools."""

import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import msgspec
import typer

from stagemesh.client import Client, Content, MediaFile, Medium, Message, Part, Tool, ToolCall, VideoFile, read_media
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


_Value = TypeVar("_Value")


class _Text(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    text: str


class _Image(msgspec.Struct, tag="image", forbid_unknown_fields=True):
    path: str


class _Audio(msgspec.Struct, tag="audio", forbid_unknown_fields=True):
    path: str


class _Video(msgspec.Struct, tag="video", forbid_unknown_fields=True):
    path: str
    use_audio_in_video: bool = False


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_Text | _Image | _Audio | _Video] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str = ""


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str = ""
    parameters: str | dict[str, Any] = ""


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: _Function
    type: Literal["function"] = "function"


def read_messages(path: Path) -> list[Message]:
    """Returns the messages in a JSON file. Paths of media are relative to the file's folder.

    Raises BadParameter if the file cannot be read or does not have the form of messages, and InvalidRequestError if a
    medium cannot be read.
    """
    return [
        Message(
            each.role,
            _content(each, path.parent),
            tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in each.tool_calls or ()),
            each.tool_call_id,
        )
        for each in _read(path, list[_Message], option="--messages")
    ]


def read_tools(path: Path) -> list[Tool]:
    """Returns the tools in a JSON file. Raises BadParameter if the file cannot be read or does not have the form of
    tools.
    """
    functions = (each.function for each in _read(path, list[_Tool], option="--tools"))
    return [Tool(each.name, each.description, each.parameters) for each in functions]


def _content(message: _Message, folder: Path) -> Content:
    if isinstance(message.content, str | None):
        return message.content or ""
    return [_part(part, folder) for part in message.content]


def _part(part: _Text | _Image | _Audio | _Video, folder: Path) -> Part:
    if isinstance(part, _Text):
        return part.text
    medium = read_media(folder / part.path)
    if isinstance(part, _Video) and isinstance(medium, VideoFile):
        return VideoFile(medium.data, medium.media_type, use_audio_in_video=part.use_audio_in_video)
    return medium


def _read(path: Path, kind: type[_Value], *, option: str) -> _Value:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc}", param_hint=option) from exc
