"""The events that a client sends in a realtime conversation."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from stagemesh.gateway import json_socket
from stagemesh.gateway.body import Object
from stagemesh.gateway.realtime.items import ItemBody, ItemId
from stagemesh.gateway.realtime.settings import ResponseBody


class UpdateSession(json_socket.ClientEvent):
    """Changes settings of the conversation."""

    type: Literal["session.update"]
    session: Object


class AppendAudio(json_socket.ClientEvent):
    """Adds audio to the input buffer, as 16-bit PCM in base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class CommitAudio(json_socket.ClientEvent):
    """Makes a message of the audio in the input buffer."""

    type: Literal["input_audio_buffer.commit"]


class ClearAudio(json_socket.ClientEvent):
    """Drops the audio in the input buffer."""

    type: Literal["input_audio_buffer.clear"]


class CreateItem(json_socket.ClientEvent):
    """Adds an item to the conversation."""

    type: Literal["conversation.item.create"]
    item: ItemBody
    previous_item_id: ItemId | None = None


class DeleteItem(json_socket.ClientEvent):
    """Removes an item from the conversation."""

    type: Literal["conversation.item.delete"]
    item_id: ItemId


class RetrieveItem(json_socket.ClientEvent):
    """Asks for an item, with the audio of the user."""

    type: Literal["conversation.item.retrieve"]
    item_id: ItemId


class TruncateItem(json_socket.ClientEvent):
    """Shortens a spoken message of the model to what the user has heard."""

    type: Literal["conversation.item.truncate"]
    item_id: ItemId
    content_index: Literal[0]
    audio_end_ms: Annotated[int, Field(ge=0)]


class CreateResponse(json_socket.ClientEvent):
    """Asks the model for a response."""

    type: Literal["response.create"]
    response: ResponseBody = ResponseBody()


class CancelResponse(json_socket.ClientEvent):
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
