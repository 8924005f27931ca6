"""The events of a client of the realtime API."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from stagemesh.gateway import websockets
from stagemesh.gateway.body import Object
from stagemesh.gateway.realtime.items import ItemBody, ItemId


class UpdateSession(websockets.ClientEvent):
    """Changes settings of the conversation."""

    type: Literal["session.update"]
    session: Object


class AppendAudio(websockets.ClientEvent):
    """Adds audio to the input buffer, as 16-bit PCM in base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class EndAudio(websockets.ClientEvent):
    """Makes a message of the audio in the input buffer, or drops it."""

    type: Literal["input_audio_buffer.commit", "input_audio_buffer.clear"]


class CreateItem(websockets.ClientEvent):
    """Adds an item to the conversation."""

    type: Literal["conversation.item.create"]
    item: ItemBody
    previous_item_id: ItemId | None = None


class NamedItem(websockets.ClientEvent):
    """Removes an item from the conversation, or asks for it with the user's audio."""

    type: Literal["conversation.item.delete", "conversation.item.retrieve"]
    item_id: ItemId


class TruncateItem(websockets.ClientEvent):
    """Shortens a spoken message of the model to what the user has heard."""

    type: Literal["conversation.item.truncate"]
    item_id: ItemId
    content_index: Literal[0]
    audio_end_ms: Annotated[int, Field(ge=0)]


class CreateResponse(websockets.ClientEvent):
    """Asks the model for a response."""

    type: Literal["response.create"]
    response: Object | None = None


class CancelResponse(websockets.ClientEvent):
    """Stops a response: by default the one that belongs to the conversation."""

    type: Literal["response.cancel"]
    response_id: str | None = None


ClientEvent: TypeAlias = (
    UpdateSession | AppendAudio | EndAudio | CreateItem | NamedItem | TruncateItem | CreateResponse | CancelResponse
)
LARGE_EVENTS = ("input_audio_buffer.append", "conversation.item.create", "response.create")
"""The types of the events that may contain audio and images."""

CLIENT_EVENT: TypeAdapter[ClientEvent] = TypeAdapter(Annotated[ClientEvent, Field(discriminator="type")])
