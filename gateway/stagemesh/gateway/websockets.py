"""WebSockets on which both sides send events as JSON."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast
from uuid import uuid4

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.gateway.body import Body, aside, decode_json
from stagemesh.gateway.catalog import offered_protocol
from stagemesh.gateway.errors import error_body, error_response, validation_error
from stagemesh.gateway.limits import Sender


class ClientEvent(Body):
    """An event of a client. An error that the event causes has its id."""

    event_id: str | None = None


E = TypeVar("E")
T = TypeVar("T")

_DISCONNECTED = (WebSocketDisconnect, WebSocketDisconnected)
"""The errors of the first and of later calls that send to a client that has disconnected."""


async def accept(websocket: WebSocket, preparation: Awaitable[T]) -> T | None:
    """Accepts a WebSocket after a preparation, and returns the result of the preparation.

    If the preparation fails, rejects the WebSocket with an HTTP status and the error as the body, and returns None.
    """
    try:
        result = await preparation
    except StagemeshError as exc:
        await websocket.send_denial_response(error_response(exc))
    else:
        await websocket.accept(subprotocol=offered_protocol(websocket))
        return result
    return None


class JsonSocket:
    """A WebSocket on which each text frame is an event. It must have been accepted."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.sender: Sender = websocket.scope["sender"]
        self.translate: Callable[[dict[str, Any]], dict[str, Any] | None] = dict
        """Called with each event before it is sent. Returns it in another form, or None if it must not be sent."""
        self.unread_bytes = 0
        """The size of the newest event, which the client may not have read. It has read the events before."""

    async def send(self, event_type: str, /, *, size_bytes: int = 0, **fields: Any) -> None:
        """Sends an event, which is encoded in a thread if its fields have many bytes.

        Does nothing if the client has disconnected, which `serve` reports by its end.
        """
        event = self.translate({"type": event_type, "event_id": f"event_{uuid4().hex}", **fields})
        if event is None:
            return
        await self.send_text(await aside(lambda: msgspec.json.encode(event).decode(), size_bytes=size_bytes))

    async def send_text(self, text: str) -> None:
        """Sends an event that is encoded. Does nothing if the client has disconnected."""
        with suppress(*_DISCONNECTED):
            await self._websocket.send_text(text)
        self.unread_bytes = len(text)

    async def send_bytes(self, data: bytes) -> None:
        """Sends a binary frame. Does nothing if the client has disconnected."""
        with suppress(*_DISCONNECTED):
            await self._websocket.send_bytes(data)

    async def send_error(self, error: StagemeshError, *, cause: str | None = None) -> None:
        """Sends an error. `cause` is the id of the client's event that caused it, or None."""
        self.sender.reject(error)
        await self.send("error", error={**error_body(error)["error"], "event_id": cause})

    async def serve(
        self, kinds: TypeAdapter[E], handle: Callable[[E], Awaitable[None]], *, large: Collection[str] = ()
    ) -> None:
        """Handles the events of the client until it disconnects. Reports the errors of events to the client.

        Waits before each event for up to 4 s if too much of what the caller sent was rejected.

        - `kinds` is a union of events that their field `type` distinguishes.
        - `handle` is called with each event. It may raise StagemeshErrors.
        - `large` are the types of events that contain media. Others have at most 1 MiB.
        """
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            cause: str | None = None
            # Other callers have a turn after each event, even if many wait.
            await asyncio.sleep(max(0.0, self.sender.pause_s()))
            content = message.get("bytes") or message.get("text", "").encode()
            self.sender.begin(content)
            try:
                if message.get("text") is None:
                    raise InvalidRequestError("a frame is binary; send each event as JSON in a text frame")
                data = await aside(partial(_decode, content, large), size_bytes=len(content))
                given = data.get("event_id")
                cause = given if isinstance(given, str) and len(given) <= _MAX_ID else None
                await handle(await aside(partial(kinds.validate_python, data), size_bytes=len(content)))
            except ValidationError as exc:
                # The first part of a location is the type of the event.
                await self.send_error(validation_error(exc, skip=1), cause=cause)
            except StagemeshError as exc:
                await self.send_error(exc, cause=cause)


_MAX_BYTES = 1 << 20
_MAX_ID = 512


def _decode(text: bytes, large: Collection[str]) -> dict[str, Any]:
    decoded = decode_json(text, fault="the event is not a JSON object")
    if not isinstance(decoded, dict):
        raise InvalidRequestError("the event is not a JSON object; send an object with its type")
    data = cast("dict[str, Any]", decoded)
    if len(text) > _MAX_BYTES and data.get("type") not in large:
        raise InvalidRequestError(
            f"the event has more than {_MAX_BYTES:,} bytes; only events with media may have more",
            reason="MESSAGE_TOO_LARGE",
        )
    return data
