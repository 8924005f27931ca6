"""The content of prompts and messages: text and media, messages, tools, and their conversion to protobuf messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidRequestError, file_access
from stagemesh.common.media.files import SUFFIXES
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.v1 import request_pb2


@dataclass(frozen=True)
class EncodedMedia:
    """The content of a file: an encoded image, audio or video."""

    data: bytes
    media_type: str
    """The data's media type, for example "image/png", "audio/wav" or "video/mp4"."""


class ImageFile(EncodedMedia):
    """An encoded image, for example the content of a PNG file."""


class AudioFile(EncodedMedia):
    """Encoded audio, for example the content of a WAV file."""


@dataclass(frozen=True)
class VideoFile(EncodedMedia):
    """An encoded video, for example the content of an MP4 file."""

    use_audio_in_video: bool = False
    """Whether the video's audio track belongs to the input. If false, the track is ignored."""


@dataclass(frozen=True, eq=False)
class AudioSamples:
    """Unencoded audio: float32 samples in [-1, 1], with shape [samples] or [samples, channels]."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int

    @property
    def duration_s(self) -> float:
        """The playing time of the samples in seconds."""
        return len(self.samples) / self.sample_rate_hz


@dataclass(frozen=True)
class MediaFile:
    """An image, audio or video file in an object store: one that `upload` or an output returned, or another one to
    which the pipeline lets requests refer.
    """

    uri: str
    media_type: str
    """The file's media type, for example "image/png". It determines the kind of medium; "image/gif" is an image."""
    size_bytes: int = 0
    """The size of the file in bytes, or 0 if it is not known. The stage compares it with the file."""
    sha256: bytes = b""
    """The SHA-256 digest of the file, or empty if it is not known. The stage compares it with the file."""
    use_audio_in_video: bool = False
    """Whether the audio track of a video belongs to the input. If false, the track is ignored."""


Medium: TypeAlias = ImageFile | AudioFile | VideoFile | AudioSamples | MediaFile
"""An image, audio or a video."""
Part: TypeAlias = str | Medium
"""One part of a prompt or of a message: text, or an image, audio or video."""
Content: TypeAlias = str | Sequence[Part]
"""The content of a prompt or of a message: text, or a sequence of text and media in the model's reading order."""

JsonObject: TypeAlias = Mapping[str, object] | str
"""A JSON object: a mapping, or its JSON text."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, with the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: JsonObject = ""
    strict: bool = False
    """Whether the arguments must conform to the schema, if the model's stage can enforce it."""


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the model must call. Without it, the model may call any number of them, or none."""

    required: bool = False
    """Whether the answer must be one call of a tool."""
    name: str = ""
    """The name of the tool that the model must call, if `required` is set. Empty for any of them."""
    single: bool = False
    """Whether the answer has at most one call."""


@dataclass(frozen=True)
class ToolCall:
    """The model's call of a tool. The result of the call refers to its id."""

    id: str
    name: str
    arguments: JsonObject = ""


@dataclass(frozen=True)
class Message:
    """A message of a conversation. `role` is "system", "developer", "user", "assistant" or "tool"."""

    role: str
    content: Content = ""
    tool_calls: Sequence[ToolCall] = ()
    """The tool calls of an assistant's message."""
    tool_call_id: str = ""
    """The id of the tool call of which a tool's message is the result."""
    reasoning: str = ""
    """The reasoning that preceded an assistant's message, for chat templates that read it."""
    name: str = ""
    """The name of the author, for chat templates that read it."""


Conversation: TypeAlias = Sequence[Message | tuple[str, Content]]
"""A conversation: a sequence of messages, oldest first. A pair of a role and its content stands for a `Message`."""


_KINDS: Mapping[str, type[ImageFile | AudioFile | VideoFile]] = {
    "image": ImageFile,
    "audio": AudioFile,
    "video": VideoFile,
}
_MEDIA_TYPES: Mapping[str, str] = {
    # A file of the type audio/webm has the suffix of video/webm, which follows it.
    **{suffix: media_type for media_type, suffix in SUFFIXES.items() if media_type.partition("/")[0] in _KINDS},
    ".jpeg": "image/jpeg",
}


def read_media(path: Path | str) -> ImageFile | AudioFile | VideoFile:
    """Returns the image, audio or video in a file. The suffix of the file name determines the kind and the media type.

    Raises InvalidRequestError (INVALID_MEDIA) if the suffix is unknown or the file cannot be read.
    """
    path = Path(path)
    media_type = media_type_of(path)
    kind = _KINDS[media_type.partition("/")[0]]
    with file_access(f"cannot read {path}", reason="INVALID_MEDIA"):
        return kind(path.read_bytes(), media_type)


def media_type_of(path: PurePath) -> str:
    """Returns the media type of an image, audio or video file. The suffix of its name determines it.

    Raises InvalidRequestError (INVALID_MEDIA) if the suffix is unknown.
    """
    if path.suffix.lower() not in _MEDIA_TYPES:
        raise InvalidRequestError(
            f"{path} has none of the suffixes of images, audio and video: {', '.join(_MEDIA_TYPES)}",
            reason="INVALID_MEDIA",
        )
    return _MEDIA_TYPES[path.suffix.lower()]


def to_message(message: Message) -> request_pb2.Message:
    """Converts a message to its protobuf message.

    Raises InvalidRequestError (INVALID_PROMPT) if its role is unknown, and (INVALID_MEDIA) if a medium is.
    """
    role = f"ROLE_{message.role.upper()}"
    if role not in request_pb2.Role.keys()[1:]:
        roles = ", ".join(name.removeprefix("ROLE_").lower() for name in request_pb2.Role.keys()[1:])
        raise InvalidRequestError(f"a message's role is {message.role!r}; use one of {roles}", reason="INVALID_PROMPT")
    return request_pb2.Message(
        role=request_pb2.Role.Value(role),
        content=message.content if isinstance(message.content, str) else "",
        parts=() if isinstance(message.content, str) else [to_part(part) for part in message.content],
        tool_calls=[
            request_pb2.ToolCall(id=call.id, name=call.name, arguments=to_json(call.arguments))
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        name=message.name,
    )


def to_json(value: JsonObject) -> str:
    """Returns the JSON text of a JSON object."""
    return value if isinstance(value, str) else json.dumps(value)


def to_part(part: Part) -> request_pb2.Part:
    """Converts a part of a message to its protobuf message.

    Raises InvalidRequestError (INVALID_MEDIA) if it is a stored file that is not an image, audio or a video.
    """
    if isinstance(part, str):
        return request_pb2.Part(text=part)
    if isinstance(part, AudioSamples):
        samples = inline_tensor("samples", np.asarray(part.samples, np.float32))
        return request_pb2.Part(audio=request_pb2.Audio(samples=samples, sample_rate_hz=part.sample_rate_hz))
    if isinstance(part, MediaFile):
        kind = part.media_type.partition("/")[0]
        file = request_pb2.MediaFile(
            uri=part.uri, media_type=part.media_type, size_bytes=part.size_bytes, sha256=part.sha256
        )
    else:
        kind = next(name for name, each in _KINDS.items() if isinstance(part, each))
        file = request_pb2.MediaFile(data=part.data, media_type=part.media_type)
    match kind:
        case "image":
            return request_pb2.Part(image=file)
        case "audio":
            return request_pb2.Part(audio_file=file)
        case "video":
            uses_audio = isinstance(part, VideoFile | MediaFile) and part.use_audio_in_video
            return request_pb2.Part(video_file=file, use_audio_in_video=uses_audio)
        case _:
            raise InvalidRequestError(
                f"the media type of {file.uri} is {file.media_type!r}; a prompt accepts images, audio and video",
                reason="INVALID_MEDIA",
            )
