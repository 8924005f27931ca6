"""Converts the messages of OpenAI's chat API to those of the client: text, images, audio and videos."""

import base64
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from stagemesh.client import AudioFile, ImageFile, MediaFile, Message, Part, ToolCall, VideoFile
from stagemesh.client.content import media_type_of
from stagemesh.common.media.decoding import MediaKind
from stagemesh.gateway import parameters
from stagemesh.gateway.body import Body, Items
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.unions import LIST, TEXT, by_type

_AUDIO_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("wav", "wave", "x-wav"), "audio/wav"),
    **dict.fromkeys(("mp3", "mpeg", "mpga"), "audio/mpeg"),
    **dict.fromkeys(("ogg", "oga", "opus"), "audio/ogg"),
    **dict.fromkeys(("m4a", "mp4"), "audio/mp4"),
    **{name: f"audio/{name}" for name in ("flac", "aac", "webm")},
}
_UNTYPED = frozenset({"", "application", "binary"})
_MAX_SETTINGS = 20
_ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "="}
_MOVING = frozenset({"audio", "video"})
"""The kinds of files whose media types clients confuse: many formats contain either."""
_FILES: Mapping[MediaKind, type[ImageFile | AudioFile | VideoFile]] = {
    "image": ImageFile,
    "audio": AudioFile,
    "video": VideoFile,
}


class PartOfMessage(Body):
    """A part of a message."""

    rules = parameters.RULES["part"]


class TextPart(PartOfMessage):
    """Text."""

    rules: ClassVar[parameters.Rules] = {**PartOfMessage.rules, **parameters.RULES["text_part"]}

    type: Literal["text"]
    text: str


class Url(Body):
    """A file: a data URL, or the URI of an object in the pipeline's store."""

    rules = parameters.RULES["media_url"]

    url: str
    use_audio: bool = False
    """Whether the audio track of a video belongs to the input."""


class ImagePart(PartOfMessage):
    """An image."""

    type: Literal["image_url"]
    image_url: Url


class InputAudio(Body):
    """An encoded audio file in base64."""

    data: str
    format: str


class InputAudioPart(PartOfMessage):
    """Audio."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(PartOfMessage):
    """Audio by its URL, as vLLM has it."""

    type: Literal["audio_url"]
    audio_url: Url


class VideoPart(PartOfMessage):
    """A video, as vLLM has it."""

    type: Literal["video_url"]
    video_url: Url


PartBody: TypeAlias = Annotated[
    TextPart | ImagePart | InputAudioPart | AudioUrlPart | VideoPart, Field(discriminator="type")
]
_Content: TypeAlias = Annotated[
    Annotated[str, TEXT] | Annotated[Items[PartBody], LIST], by_type("a text or a list of parts")
]


class FunctionCall(Body):
    """The function that a tool call names, with its arguments as JSON text."""

    rules = parameters.RULES["function_call"]

    name: str
    arguments: str


class ToolCallBody(Body):
    """A tool call of an earlier answer."""

    rules = parameters.RULES["tool_call"]

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SpokenAnswer(Body):
    """The audio of an earlier answer, which the gateway does not keep."""

    rules = parameters.RULES["message_audio"]

    id: str
    transcript: str | None = None


class MessageBody(Body):
    """A message of a conversation."""

    rules = parameters.RULES["message"]

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    refusal: str | None = None
    audio: SpokenAnswer | None = None
    tool_calls: Items[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    """The name of the author, for chat templates that read it."""

    def to_message(self, index: int) -> Message:
        """Returns the client's message. `index` is that of the message in the conversation."""
        where = f"messages.{index}.content"
        content = self.content or self.refusal or (self.audio and self.audio.transcript) or ""
        if self.audio is not None and not content:
            parameters.warn("audio", "is not kept and was ignored; send its transcript as the content of the message")
        return Message(
            role=self.role,
            content=content
            if isinstance(content, str)
            else [_to_part(part, f"{where}.{number}") for number, part in enumerate(content)],
            tool_calls=[
                ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
            ],
            tool_call_id=self.tool_call_id or "",
            reasoning=self.reasoning_content or self.reasoning or "",
            name=self.name or "",
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
            if audio.format.lower() not in _AUDIO_TYPES:
                raise ParameterError(
                    f"{where}.input_audio.format",
                    f"{audio.format[:40]!r} is unknown; use one of {', '.join(_AUDIO_TYPES)}",
                )
            data = decode_base64(audio.data, param=f"{where}.input_audio.data")
            return AudioFile(data, _AUDIO_TYPES[audio.format.lower()])


def check_kind(media_type: str, kind: MediaKind, param: str) -> None:
    """Raises ParameterError if the stated media type of a file is of another kind. A wrong format does not matter."""
    stated = media_type.lower().partition("/")[0]
    if stated not in _UNTYPED | ({kind} if kind == "image" else _MOVING):
        raise ParameterError(param, f"its media type is {media_type[:100]!r}; send {kind}/TYPE")


def file_at(url: Url, param: str, *, kind: MediaKind) -> Part:
    """Returns the file of a data URL, or the reference to a stored one."""
    scheme, _, rest = url.url.strip().partition(":")
    if scheme.lower() in {"http", "https"}:
        raise ParameterError(param, "the gateway fetches nothing; send a data URL, or upload the file")
    if scheme.lower() != "data":
        return MediaFile(url.url, media_type_of(PurePath(url.url)), use_audio_in_video=url.use_audio)
    description, comma, text = rest.partition(",")
    media_type, *settings = [each.strip() for each in description.lower().split(";", _MAX_SETTINGS)]
    if not comma or "base64" not in settings:
        raise ParameterError(param, f"it is not a data URL of the form data:{kind}/TYPE;base64,DATA")
    check_kind(media_type, kind, param)
    for escape, meant in _ESCAPES.items():
        text = text.replace(escape, meant).replace(escape.lower(), meant)
    data = decode_base64(text, param=param)
    file = _FILES[kind](data, media_type or "application/octet-stream")
    return replace(file, use_audio_in_video=url.use_audio) if isinstance(file, VideoFile) else file


CODED_BYTES = 3 << 16
"""The bytes that are encoded or decoded at once, because base64 lets no other thread run."""
_CLEANED = {"-": "+", "_": "/", "\n": "", "\r": "", "\t": "", " ": ""}
"""The characters of the alphabet of URLs and white space, with what they stand for in base64."""


def decode_base64(text: str, *, param: str) -> bytes:
    """Returns the bytes that are encoded in base64, with or without padding, also in the alphabet of URLs. Blocks.

    Raises ParameterError (INVALID_MEDIA) if there are none or the text is not base64. Ignores white space.
    """
    text, size = text.rstrip("= \t\r\n"), CODED_BYTES * 4 // 3
    parts, left = list[bytes](), ""
    try:
        if "=" in text:
            raise ValueError("it has data after its padding")  # noqa: TRY301 - reported as the others
        for begin in range(0, len(text), size):
            piece = left + text[begin : begin + size]
            for character, meant in _CLEANED.items():
                piece = piece.replace(character, meant)
            whole = len(piece) & ~3
            parts.append(base64.b64decode(piece[:whole], validate=True))
            left = piece[whole:]
        parts.append(base64.b64decode(left + "=" * (-len(left) % 4), validate=True))
    except ValueError as exc:
        raise ParameterError(param, f"it is not base64: {exc}", reason="INVALID_MEDIA") from exc
    data = b"".join(parts)
    if not data:
        raise ParameterError(param, "it is empty", reason="INVALID_MEDIA")
    return data
