"""Converts the messages of OpenAI's chat API to those of the client: text, images, audio and videos."""

import base64
from pathlib import PurePath
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from stagemesh.client import AudioFile, ImageFile, MediaFile, Message, Part, ToolCall, VideoFile
from stagemesh.client.content import media_type_of
from stagemesh.gateway.body import Body, Items
from stagemesh.gateway.errors import ParameterError

_AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg", "opus": "audio/ogg"}


class TextPart(Body):
    """Text."""

    type: Literal["text"]
    text: str


class Url(Body):
    """A file: a data URL, or the URI of an object in the pipeline's store."""

    url: str
    detail: Literal["auto"] | None = None
    use_audio: bool = False
    """Whether the audio track of a video belongs to the input."""


class ImagePart(Body):
    """An image."""

    type: Literal["image_url"]
    image_url: Url


class InputAudio(Body):
    """An encoded audio file in base64."""

    data: str
    format: str


class InputAudioPart(Body):
    """Audio."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(Body):
    """Audio by its URL, as vLLM has it."""

    type: Literal["audio_url"]
    audio_url: Url


class VideoPart(Body):
    """A video, as vLLM has it."""

    type: Literal["video_url"]
    video_url: Url


PartBody: TypeAlias = Annotated[
    TextPart | ImagePart | InputAudioPart | AudioUrlPart | VideoPart, Field(discriminator="type")
]


class FunctionCall(Body):
    """The function that a tool call names, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallBody(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class MessageBody(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[PartBody] | None = None
    name: None = None
    refusal: None = None
    annotations: Items[None] | None = None
    tool_calls: Items[ToolCallBody] | None = None
    tool_call_id: str | None = None

    def to_message(self, index: int) -> Message:
        """Returns the client's message. `index` is that of the message in the conversation."""
        where = f"messages.{index}.content"
        content = self.content or ""
        return Message(
            role=self.role,
            content=content
            if isinstance(content, str)
            else [_to_part(part, f"{where}.{number}") for number, part in enumerate(content)],
            tool_calls=[
                ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
            ],
            tool_call_id=self.tool_call_id or "",
        )


def _to_part(part: PartBody, where: str) -> Part:
    match part:
        case TextPart():
            return part.text
        case ImagePart():
            return file_at(part.image_url, f"{where}.image_url.url", kind="image")
        case AudioUrlPart():
            return file_at(part.audio_url, f"{where}.audio_url.url", kind="audio")
        case VideoPart():
            return file_at(part.video_url, f"{where}.video_url.url", kind="video")
        case InputAudioPart():
            audio = part.input_audio
            if audio.format not in _AUDIO_TYPES:
                raise ParameterError(
                    f"{where}.input_audio.format", f"{audio.format!r} is unknown; use one of {', '.join(_AUDIO_TYPES)}"
                )
            data = decode_base64(audio.data, param=f"{where}.input_audio.data")
            return AudioFile(data, _AUDIO_TYPES[audio.format])


def file_at(url: Url, param: str, *, kind: Literal["image", "audio", "video"]) -> Part:
    """Returns the file of a data URL, or the reference to a stored one."""
    scheme, _, rest = url.url.partition(":")
    if scheme in {"http", "https"}:
        raise ParameterError(param, "the gateway fetches nothing; send a data URL, or upload the file")
    if scheme != "data":
        return MediaFile(url.url, media_type_of(PurePath(url.url)), use_audio_in_video=url.use_audio)
    description, comma, text = rest.partition(",")
    media_type, *parameters = description.split(";")
    if not comma or "base64" not in parameters or media_type.partition("/")[0] != kind:
        raise ParameterError(param, f"it is not a data URL of the form data:{kind}/TYPE;base64,DATA")
    data = decode_base64(text, param=param)
    if kind == "video":
        return VideoFile(data, media_type, use_audio_in_video=url.use_audio)
    return ImageFile(data, media_type) if kind == "image" else AudioFile(data, media_type)


CODED_BYTES = 3 << 16
"""The bytes that are encoded or decoded at once, because base64 lets no other thread run."""


def decode_base64(text: str, *, param: str) -> bytes:
    """Returns the bytes that are encoded in base64. Blocks. Raises InvalidRequestError if there are none."""
    size = CODED_BYTES * 4 // 3
    try:
        parts = [base64.b64decode(text[begin : begin + size], validate=True) for begin in range(0, len(text), size)]
    except ValueError as exc:
        raise ParameterError(param, f"it is not base64: {exc}", reason="INVALID_MEDIA") from exc
    if any(len(part) < CODED_BYTES for part in parts[:-1]):
        raise ParameterError(param, "it is not base64: it has data after its padding", reason="INVALID_MEDIA")
    data = b"".join(parts)
    if not data:
        raise ParameterError(param, "it is empty", reason="INVALID_MEDIA")
    return data
