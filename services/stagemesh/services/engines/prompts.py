"""The prompts of tasks: texts, conversations with tools, and media files or samples, with the supported media types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from typing import Literal, TypeAlias

from pydantic import JsonValue

from stagemesh.common.media.decoding import MediaKind
from stagemesh.common.media.store import FetchedFile
from stagemesh.common.wire.tensors import Array
from stagemesh.v1 import request_pb2


@dataclass
class MediaFile:
    """An encoded image, audio or video file."""

    kind: MediaKind
    data: bytes
    """The content of an inline file. Empty if the file is in a store."""
    media_type: str
    """The media type that the request states. It may be wrong: the content determines the format."""
    use_audio: bool = False
    """Whether the audio track of a video belongs to the input."""
    reference: request_pb2.MediaFile | None = None
    """The file in a store to which the request refers. None if the file is inline."""
    stored: FetchedFile | None = None
    """The opened file in a store, whose digest has been checked. Set while a step has the file open."""

    def open(self) -> BufferedReader | BytesIO:
        """Returns a new reader at the start of the file. Close it after use. Reading never waits for a store."""
        return BytesIO(self.data) if self.stored is None else self.stored.open()

    @property
    def size_bytes(self) -> int:
        """The size of the encoded file in bytes."""
        return len(self.data) if self.stored is None else self.stored.size_bytes


@dataclass(frozen=True, eq=False)
class Samples:
    """Decoded audio: float32[samples] for one channel, or float32[samples, channels]. Values are in [-1, 1]."""

    samples: Array
    sample_rate_hz: int

    @property
    def kind(self) -> MediaKind:
        """The kind of medium, always "audio"."""
        return "audio"


Medium: TypeAlias = MediaFile | Samples
Part: TypeAlias = str | Medium
"""One part of a message: text, a media file or audio samples."""


Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model. `arguments` is a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, JsonValue]
    strict: bool = False
    """Whether the arguments must conform to the schema, if the engine can enforce it."""


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str = ""
    parts: Sequence[Part] = ()
    """The message's text and media in order. If `parts` is not empty, `content` is ignored."""
    tool_calls: Sequence[ToolCall] = ()
    """The tool calls of an assistant's message."""
    result_of: ToolCall | None = None
    """The tool call of which a tool's message is the result."""
    reasoning: str = ""
    """The reasoning that preceded an assistant's message."""
    name: str = ""
    """The name of the author."""


@dataclass(frozen=True)
class Conversation:
    """A conversation, which the engine formats with the model's chat template."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    template_arguments: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Further arguments of the chat template."""
    tool_choice: request_pb2.ToolChoice = field(default_factory=request_pb2.ToolChoice)


@dataclass(frozen=True)
class RawPrompt:
    """Text or token ids to which no chat template is applied."""

    content: str | Sequence[int]
    media: Sequence[Medium] = ()
    """The media to which the prompt's placeholders refer, in order."""


Prompt: TypeAlias = str | Conversation | RawPrompt
"""A prompt. An engine that applies a chat template treats text as one user message."""


def media_of(prompt: Prompt | None) -> Sequence[Medium]:
    """Returns the images, audio and videos of a prompt, in order."""
    match prompt:
        case Conversation():
            return [part for each in prompt.messages for part in each.parts if not isinstance(part, str)]
        case RawPrompt():
            return prompt.media
        case _:
            return ()


def text_beside_media(prompt: Prompt | None) -> str | None:
    """Returns the text of a prompt that consists of text and media, for example of one message.

    Returns None if the prompt contains token ids, tools or several messages. The parts of the text become lines.
    """
    match prompt:
        case RawPrompt(content=str(text)):
            return text
        case Conversation(messages=[message]) if not prompt.tools and not prompt.template_arguments:
            texts = [part for part in message.parts if isinstance(part, str)]
            return "\n".join(texts) if message.parts else message.content
        case str():
            return prompt
        case _:
            return None
