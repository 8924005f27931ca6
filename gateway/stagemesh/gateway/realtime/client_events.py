"""The events that a client sends in a realtime conversation."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from stagemesh.gateway.body import Body, Object
from stagemesh.gateway.realtime.items import ItemBody, ItemId
from stagemesh.gateway.realtime.settings import ResponseBody


class _Event(Body):
    event_id: str | None = None


class UpdateSession(_Event):
    """Changes settings of the conversation."""

    type: Literal["session.update"]
    session: Object


class AppendAudio(_Event):
    """Adds audio to the input buffer, as 16-bit PCM in base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class CommitAudio(_Event):
    """Makes a message of the audio in the input buffer."""

    type: Literal["input_audio_buffer.commit"]


class ClearAudio(_Event):
    """Drops the audio in the input buffer."""

    type: Literal["input_audio_buffer.clear"]


class CreateItem(_Event):
    """Adds an item to the conversation."""

    type: Literal["conversation.item.create"]
    item: ItemBody
    previous_item_id: ItemId | None = None


class DeleteItem(_Event):
    """Removes an item from the conversation."""

    type: Literal["conversation.item.delete"]
    item_id: ItemId


class RetrieveItem(_Event):
    """Asks for an item, with the audio of the user."""

    type: Literal["conversation.item.retrieve"]
    item_id: ItemId


class TruncateItem(_Event):
    """Shortens a spoken message of the model to what the user has heard."""

    type: Literal["conversation.item.truncate"]
    item_id: ItemId
    content_index: Literal[0]
    audio_end_ms: Annotated[int, Field(ge=0)]


class CreateResponse(_Event):
    """Asks the model for a response."""

    type: Literal["response.create"]
    response: ResponseBody = ResponseBody()


class CancelResponse(_Event):
    """Stops a response: by default the one that belongs to the conversation."""

    type: Literal["response.cancel"]
    response_id: str | None = None


ClientEvent: TypeAlias = (
    UpdateSession
    | AppendAudio
    | CommitAudio
    | ClearAudio
    | CreateItem
    | DeleteItem
    | RetrieveItem
    | TruncateItem
    | CreateResponse
    | CancelResponse
)
CLIENT_EVENT: TypeAdapter[ClientEvent] = TypeAdapter(Annotated[ClientEvent, Field(discriminator="type")])
