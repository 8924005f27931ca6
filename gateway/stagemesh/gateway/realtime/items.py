"""The items of a realtime conversation: messages, tool calls and their results."""

import base64
import io
import sys
import wave
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast
from uuid import uuid4

from pydantic import AfterValidator, Field, PrivateAttr

from stagemesh.client import AudioFile, Message, Part, ToolCall
from stagemesh.common.errors import OverloadedError
from stagemesh.common.requests.turn_content import shorten
from stagemesh.gateway.audio import PCM_RATE_HZ
from stagemesh.gateway.body import MAX_ITEMS, Body, Items
from stagemesh.gateway.content import CODED_BYTES, Url, decode_base64, file_at
from stagemesh.gateway.errors import ParameterError

PCM_BYTES_PER_S = 2 * PCM_RATE_HZ
_MAX_BYTES = 32 << 20
"""The limit for the items of a conversation, in memory."""
_ROOT = "root"
_OBJECT_BYTES = 1200
"""The memory of an item, or of a content of it, without its texts."""

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ItemId: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]


class RealtimeBody(Body):
    """A part of an event. Clients send the fields of the items and of the session that they received, and more."""

    permits_unknown_nulls = True


class InputText(RealtimeBody):
    """Text of the user or of the system."""

    type: Literal["input_text"]
    text: str

    def to_part(self) -> Part:
        """Returns the text."""
        return self.text


class InputAudioContent(RealtimeBody):
    """The user's audio, as 16-bit PCM in base64, or its transcript if a client sends an item back without the audio."""

    type: Literal["input_audio"]
    audio: str | None = None
    transcript: str | None = None

    def to_part(self) -> Part:
        """Returns the audio as a WAV file, or its transcript. Raises ParameterError if it is not PCM in base64."""
        if self.audio is None:
            if self.transcript is None:
                raise ParameterError("item.content.audio", "it is missing; send the audio or its transcript")
            return self.transcript
        pcm = decode_base64(self.audio, param="item.content.audio")
        if len(pcm) % 2:
            raise ParameterError("item.content.audio", "it has half a sample; send 16-bit PCM", reason="INVALID_MEDIA")
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, PCM_RATE_HZ, 0, "NONE", ""))
            writer.writeframes(pcm)
        return AudioFile(file.getvalue(), "audio/wav")


class InputImage(RealtimeBody):
    """An image of the user, as a data URL."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None

    def to_part(self) -> Part:
        """Returns the image. Raises ParameterError if the URL is not a data URL of an image."""
        return file_at(Url(url=self.image_url), "item.content.image_url", kind="image")


class OutputText(RealtimeBody):
    """Text of the model."""

    type: Annotated[Literal["output_text", "text"], AfterValidator(lambda _: "output_text")] = "output_text"
    text: str = ""


class OutputAudioContent(RealtimeBody):
    """A spoken text of the model. Its audio is not kept."""

    type: Annotated[Literal["output_audio", "audio"], AfterValidator(lambda _: "output_audio")] = "output_audio"
    transcript: str = ""
    audio: Annotated[str | None, AfterValidator(lambda _: None)] = None


InputContent: TypeAlias = Annotated[InputText | InputAudioContent | InputImage, Field(discriminator="type")]
OutputContent: TypeAlias = Annotated[OutputText | OutputAudioContent, Field(discriminator="type")]


class _Item(RealtimeBody):
    id: ItemId | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: Status | None = None

    @property
    def key(self) -> str:
        """The id of an item of the conversation."""
        assert self.id is not None, "the conversation gives each item an id"
        return self.id

    def to_json(self, *, with_audio: bool = False) -> dict[str, Any]:
        """Returns the item as it is sent to the client, without the audio of its contents by default."""
        data = self.model_dump(exclude_none=True)
        for content in data.get("content", ()):
            if not with_audio:
                content.pop("audio", None)
        return data


class UserMessage(_Item):
    """A message of the user."""

    type: Literal["message"] = "message"
    role: Literal["user"]
    content: Annotated[Items[InputContent], Field(min_length=1)]


class SystemMessage(_Item):
    """An instruction within the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system"]
    content: Annotated[Items[InputText], Field(min_length=1)]


class AssistantMessage(_Item):
    """A message of the model: text or a spoken text. Those of responses have one content."""

    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: Annotated[Items[OutputContent], Field(min_length=1)]
    _audio_bytes: int = PrivateAttr(default=0)

    @property
    def text(self) -> str:
        """The text of all contents."""
        return "".join(each.text if isinstance(each, OutputText) else each.transcript for each in self.content)

    def append(self, text: str) -> None:
        """Adds text to the first content."""
        content = self.content[0]
        if isinstance(content, OutputText):
            content.text += text
        else:
            content.transcript += text

    @property
    def audio_ms(self) -> int:
        """The length of the audio that was sent, in milliseconds."""
        return self._audio_bytes * 1000 // PCM_BYTES_PER_S

    def add_audio(self, pcm: bytes) -> None:
        """Records that audio was sent."""
        self._audio_bytes += len(pcm)

    def truncate(self, audio_end_ms: int) -> None:
        """Shortens a spoken text to what the user has heard: the same share as of the audio, up to the end of a word.

        Raises ParameterError if the message has no audio, less of it, or is not complete.
        """
        content = self.content[0]
        if not isinstance(content, OutputAudioContent) or not self._audio_bytes:
            raise ParameterError("item_id", "the item has no audio that can be truncated")
        if self.status == "in_progress":
            raise ParameterError("item_id", "its response is in progress; cancel the response before you truncate it")
        if audio_end_ms > self.audio_ms:
            raise ParameterError("audio_end_ms", f"the audio has {self.audio_ms} ms; send at most that")
        share = audio_end_ms / max(self.audio_ms, 1)
        content.transcript = shorten(content.transcript, length=int(share * len(content.transcript)))
        self._audio_bytes = audio_end_ms * PCM_BYTES_PER_S // 1000


class FunctionCallItem(_Item):
    """A tool call of the model."""

    type: Literal["function_call"] = "function_call"
    name: str
    arguments: str
    call_id: str | None = None


class FunctionCallOutput(_Item):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str


class ItemReference(RealtimeBody):
    """An item of the conversation, by its id."""

    type: Literal["item_reference"]
    id: ItemId


MessageItem: TypeAlias = Annotated[UserMessage | SystemMessage | AssistantMessage, Field(discriminator="role")]
ItemBody: TypeAlias = Annotated[MessageItem | FunctionCallItem | FunctionCallOutput, Field(discriminator="type")]
Item: TypeAlias = UserMessage | SystemMessage | AssistantMessage | FunctionCallItem | FunctionCallOutput


class Conversation:
    """The items of a conversation, in order. An insertion at the end takes the same time for any number of items."""

    def __init__(self) -> None:
        self.id = f"conv_{uuid4().hex}"
        self._items: dict[str, Item] = {}
        self._ids: list[str] = []
        """The ids of the items, in order."""
        self._sizes: dict[str, int] = {}
        self.size_bytes = 0
        """The memory of all items."""

    def insert(self, item: Item, *, previous_id: str | None = None) -> str | None:
        """Inserts an item after another one, or at the end. "root" stands for the begin. Returns the id before it.

        Gives the item an id if it has none. Raises ParameterError if the previous item does not exist, or the id
        exists, and OverloadedError if the conversation becomes too large.
        """
        if item.id is None:
            item.id = f"item_{uuid4().hex}"
        elif item.id in self._items or item.id == _ROOT:
            problem = f"an item with the id {item.id!r} exists; use another id"
            raise ParameterError("item.id", problem, code="item_create_duplicate_item_id")
        if self.size_bytes + memory_bytes(item) > _MAX_BYTES or len(self._items) >= MAX_ITEMS:
            raise OverloadedError(
                f"the conversation would exceed {_MAX_BYTES:,} bytes or {MAX_ITEMS:,} items; delete older items",
                reason="SESSION_TOO_LARGE",
            )
        before = previous_id or self.last_id or _ROOT
        place = 0 if before == _ROOT else self._ids.index(self.find(before, param="previous_item_id").key) + 1
        self._ids.insert(place, item.id)
        self._items[item.id] = item
        self.measure(item)
        return None if before == _ROOT else before

    def measure(self, item: Item) -> None:
        """Counts the size of an item of the conversation again, after it was inserted or changed."""
        if item.key in self._items:
            size_bytes = memory_bytes(item)
            self.size_bytes += size_bytes - self._sizes.get(item.key, 0)
            self._sizes[item.key] = size_bytes

    def find(self, item_id: str, *, param: str = "item_id") -> Item:
        """Returns an item. Raises ParameterError if it does not exist."""
        if item_id not in self._items:
            raise ParameterError(param, f"the conversation has no item {item_id!r}")
        return self._items[item_id]

    def delete(self, item_id: str) -> None:
        """Removes an item. Raises ParameterError if it does not exist."""
        del self._items[self.find(item_id).key]
        self._ids.remove(item_id)
        self.size_bytes -= self._sizes.pop(item_id)

    @property
    def last_id(self) -> str | None:
        """The id of the last item, or None if there is none."""
        return self._ids[-1] if self._ids else None

    @property
    def items(self) -> Sequence[Item]:
        """All items."""
        return [self._items[each] for each in self._ids]


def to_messages(instructions: str | None, items: Sequence[Item]) -> Iterator[Message]:
    """Yields the messages of a prompt. A message of the model includes the tool calls that follow it. Blocks."""
    if instructions:
        yield Message("system", instructions)
    text, calls = "", list[ToolCall]()
    for item in items:
        if isinstance(item, FunctionCallItem):
            calls.append(ToolCall(item.call_id or item.key, item.name, item.arguments))
            continue
        if text or calls:
            yield Message("assistant", text, tool_calls=calls)
            text, calls = "", []
        match item:
            case AssistantMessage():
                text = item.text
            case FunctionCallOutput():
                yield Message("tool", item.output, tool_call_id=item.call_id)
            case UserMessage() | SystemMessage():
                yield Message(item.role, [content.to_part() for content in item.content])
    if text or calls:
        yield Message("assistant", text, tool_calls=calls)


def audio_item(pcm: bytes, *, item_id: str | None) -> UserMessage:
    """Returns a user message that consists of audio. Blocks."""
    content = InputAudioContent(type="input_audio", audio=pcm_to_base64(pcm))
    return UserMessage(role="user", content=[content], id=item_id, status="completed")


def pcm_to_base64(pcm: bytes) -> str:
    """Returns audio in base64, as items have it. Blocks."""
    parts = (base64.b64encode(pcm[begin : begin + CODED_BYTES]) for begin in range(0, len(pcm), CODED_BYTES))
    return b"".join(parts).decode()


def memory_bytes(value: object) -> int:
    """Returns the memory of an item, or of a value in it, in bytes."""
    if isinstance(value, Body):
        return _OBJECT_BYTES + sum(map(memory_bytes, vars(value).values()))
    if isinstance(value, list):
        values = cast("list[object]", value)
        return sys.getsizeof(values) + sum(map(memory_bytes, values))
    return sys.getsizeof(value) if isinstance(value, str) else 0
