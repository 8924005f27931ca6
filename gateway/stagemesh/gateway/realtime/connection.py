"""`/v1/realtime`: a conversation over a WebSocket, with the client's events and detected speech."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.websockets import WebSocket

from stagemesh.client import AsyncResponseStream, SpeechDetected, TurnCommitted
from stagemesh.common.errors import NotReadyError, OverloadedError, StagemeshError
from stagemesh.gateway.body import Object, aside
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.errors import ParameterError, validation_error
from stagemesh.gateway.limits import Sender
from stagemesh.gateway.realtime import events
from stagemesh.gateway.realtime.beta import from_beta, is_beta, offers_beta, to_beta
from stagemesh.gateway.realtime.input_audio import Heard, InputBuffer, Listener, decode_audio
from stagemesh.gateway.realtime.items import (
    AssistantMessage,
    Conversation,
    Item,
    ItemReference,
    audio_item,
    memory_bytes,
    to_messages,
)
from stagemesh.gateway.realtime.response import CancelReason, Response
from stagemesh.gateway.realtime.settings import ResponseBody, ServerVad, Settings, Update
from stagemesh.gateway.websockets import JsonSocket, accept

_MAX_RESPONSES = 4
"""The number of responses of a connection that may run at once, including the one that belongs to the conversation."""


class Connection:
    """The conversation of one client. Its events are handled one after the other."""

    def __init__(self, websocket: WebSocket, settings: Settings) -> None:
        self._websocket, self._settings, self._settings_bytes = websocket, settings, 0
        self._defaults = settings
        self._socket = JsonSocket(websocket)
        self._socket.translate = to_beta if offers_beta(websocket) else dict
        self._kept: Sender = websocket.scope["kept"]
        self._send = self._socket.send
        self._session_id = f"sess_{uuid4().hex}"
        self._conversation = Conversation()
        self._buffer = InputBuffer()
        self._listener: Listener | None = None
        self._spoken_id: str | None = None
        """The id of the message that will contain the speech of the user, while the user speaks."""
        self._response: Response | None = None
        """The newest response that belongs to the conversation."""
        self._responses: list[Response] = []
        """All responses that may be running."""
        self._lock = asyncio.Lock()
        """Held while an event of the client or of the listener is handled."""

    async def run(self) -> None:
        """Serves the client until it disconnects."""
        try:
            await self._send("session.created", session=self._session())
            await self._socket.serve(events.CLIENT_EVENT, self._receive, large=events.LARGE_EVENTS)
        finally:
            await self._stop_listening()
            for response in self._responses:
                await response.stop()

    async def _receive(self, event: events.ClientEvent) -> None:
        async with self._lock:
            try:
                await self._handle(event)
            finally:
                with suppress(OverloadedError):
                    self._hold(0)

    def _hold(self, size_bytes: int) -> None:
        """Counts what the conversation keeps, and further bytes. Raises OverloadedError if the share is smaller."""
        size_bytes += self._conversation.size_bytes + self._buffer.size_bytes + self._socket.unread_bytes
        if not self._kept.hold(size_bytes + self._settings_bytes + sum(each.prompt_bytes for each in self._running)):
            raise OverloadedError(
                "the conversations of the caller have the size that this gateway can hold; delete items, or close some",
                reason="SESSION_TOO_LARGE",
            )

    async def _handle(self, event: events.ClientEvent) -> None:
        match event:
            case events.UpdateSession():
                await self._update(event.session)
            case events.AppendAudio():
                await self._append(event.audio)
            case events.EndAudio(type="input_audio_buffer.commit"):
                await self._commit()
            case events.EndAudio():
                await self._stop_listening()
                self._buffer.take()
                await self._send("input_audio_buffer.cleared")
            case events.CreateItem():
                decode = partial(decode_audio, event.item, self._settings.audio.input.format.type)
                await aside(decode, size_bytes=memory_bytes(event.item))
                await self._add_item(event.item, previous_id=event.previous_item_id)
            case events.NamedItem(type="conversation.item.delete"):
                self._conversation.delete(event.item_id)
                await self._send("conversation.item.deleted", item_id=event.item_id)
            case events.NamedItem():
                item = self._conversation.find(event.item_id)
                data, size_bytes = item.to_json(with_audio=True), memory_bytes(item)
                self._hold(size_bytes)
                self._socket.sender.charge(size_bytes)
                await self._send("conversation.item.retrieved", item=data, size_bytes=size_bytes)
            case events.CreateResponse():
                await self._respond(event.response or {})
            case events.CancelResponse():
                await self._cancel(event.response_id)
            case _:
                await self._truncate(event)

    # -- settings and items

    async def _update(self, changes: Object) -> None:
        if is_beta(changes) or "type" in changes:
            # Some clients ask for the beta when they connect, and use today's names, which need a type.
            self._socket.translate = to_beta if is_beta(changes) else dict
        update = Update(await find_model(self._websocket, self._settings.model), "session")
        settings = await self._changed(changes, update, defaults=self._defaults)
        old, new = self._settings.audio.input, settings.audio.input
        if new.turn_detection != old.turn_detection:
            await self._stop_listening()
        if new.format != old.format:
            self._buffer.accept(new.format.type)
        self._settings = settings
        self._settings_bytes = max(self._settings_bytes, self._socket.sender.content_bytes)
        await self._send("session.updated", session=self._session(), **update.warnings)
        if update.error is not None:
            raise update.error

    async def _changed(self, changes: Object, update: Update, *, defaults: Settings) -> Settings:
        # The answer has all settings.
        self._socket.sender.charge(self._settings_bytes)
        make = partial(update.apply, from_beta(changes), self._settings, defaults=defaults)
        return await aside(make, size_bytes=self._settings_bytes + self._socket.sender.content_bytes)

    def _session(self) -> dict[str, Any]:
        return {"object": "realtime.session", "id": self._session_id, **self._settings.model_dump()}

    async def _add_item(self, item: Item, *, previous_id: str | None = None) -> None:
        size_bytes = memory_bytes(item)
        self._hold(2 * size_bytes)
        await aside(lambda: list(to_messages(None, [item])), size_bytes=size_bytes)
        item.status = "completed"
        before = self._conversation.insert(item, previous_id=previous_id)
        for step in ("added", "done"):
            fields: Any = {"previous_item_id": before, "item": item.to_json()}
            await self._send(f"conversation.item.{step}", size_bytes=size_bytes, **fields)

    async def _truncate(self, event: events.TruncateItem) -> None:
        item = self._conversation.find(event.item_id)
        if not isinstance(item, AssistantMessage):
            raise ParameterError("item_id", "only spoken messages of the model can be truncated")
        item.truncate(event.audio_end_ms)
        self._conversation.measure(item)
        await self._send(
            "conversation.item.truncated", item_id=item.key, content_index=0, audio_end_ms=event.audio_end_ms
        )

    # -- audio of the user

    async def _append(self, data: str) -> None:
        self._hold(2 * self._buffer.expansion * len(data))
        samples = await aside(partial(self._buffer.append, data), size_bytes=len(data))
        vad = self._settings.audio.input.turn_detection
        if vad is None:
            return
        if self._listener is None:
            model = await find_model(self._websocket, self._settings.model)
            begin_s = self._buffer.end_s - samples.duration_s
            self._listener = await Listener.open(model, vad.to_detection(), begin_s=begin_s, on_event=self._take)
        await self._listener.append(samples)
        if self._spoken_id is None:
            self._buffer.forget_silence()

    async def _commit(self) -> None:
        await self._stop_listening()
        pcm = self._buffer.take()
        if not pcm:
            problem = "the input buffer is empty; append audio before the commit"
            raise ParameterError(None, problem, code="input_audio_buffer_commit_empty")
        await self._commit_audio(pcm, item_id=None)

    async def _commit_audio(self, pcm: bytes, *, item_id: str | None) -> None:
        make_item = partial(audio_item, pcm, item_id=item_id or f"item_{uuid4().hex}")
        item = await aside(make_item, size_bytes=len(pcm))
        await self._send("input_audio_buffer.committed", previous_item_id=self._conversation.last_id, item_id=item.key)
        await self._add_item(item)

    async def _stop_listening(self) -> None:
        listener, self._listener, self._spoken_id = self._listener, None, None
        if listener is not None:
            await listener.close()

    async def _take(self, event: Heard) -> None:
        """Called with each event of the listener."""
        async with self._lock:
            match event:
                case SpeechDetected():
                    await self._hear(event)
                case TurnCommitted():
                    await self._end_turn(event)
                case StagemeshError():
                    self._listener, self._spoken_id = None, None
                    await self._socket.send_error(event)

    async def _hear(self, speech: SpeechDetected) -> None:
        at_ms = round(speech.at_s * 1000)
        if not speech.begins:
            await self._send("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=self._spoken_id)
            return
        self._buffer.take(until_s=speech.at_s)
        self._spoken_id = f"item_{uuid4().hex}"
        await self._send("input_audio_buffer.speech_started", audio_start_ms=at_ms, item_id=self._spoken_id)
        if self._vad.interrupt_response and self._response is not None:
            await self._response.cancel("turn_detected")

    async def _end_turn(self, turn: TurnCommitted) -> None:
        item_id, self._spoken_id = self._spoken_id, None
        await self._commit_audio(self._buffer.take(until_s=turn.audio_end_s), item_id=item_id)
        if self._vad.create_response:
            try:
                await self._respond({})
            except StagemeshError as exc:
                await self._socket.send_error(exc)

    @property
    def _vad(self) -> ServerVad:
        vad = self._settings.audio.input.turn_detection
        assert vad is not None, "there is a listener only with the detection of turns"
        return vad

    # -- responses

    async def _respond(self, given: Object) -> None:
        make_body = partial(ResponseBody.model_validate, {key: given[key] for key in _RESPONSE_KEYS & given.keys()})
        try:
            body = await aside(make_body, size_bytes=self._socket.sender.content_bytes)
        except ValidationError as exc:
            raise validation_error(exc, under="response") from None
        belongs = body.conversation == "auto"
        if belongs and self._response is not None and self._response.is_running:
            problem = f"the response {self._response.id!r} is in progress; cancel it, or wait for response.done"
            raise ParameterError(None, problem, code="conversation_already_has_active_response")
        if len(self._running) >= _MAX_RESPONSES:
            raise OverloadedError(
                f"{_MAX_RESPONSES} responses are in progress, which is the limit; cancel one, or wait for its end",
                reason="CALL_LIMIT",
            )
        changes = {key: value for key, value in given.items() if key not in _RESPONSE_KEYS}
        model, settings = await find_model(self._websocket, self._settings.model), self._settings
        update = Update(model, "response")
        if changes:
            settings = await self._changed(changes, update, defaults=settings)
        if update.error is not None:
            raise update.error
        prompt_bytes = self._conversation.size_bytes + self._settings_bytes + memory_bytes(body)
        prompt_bytes += memory_bytes(settings.instructions)
        self._hold(prompt_bytes)
        make_request = partial(self._make_request, model, settings, self._input(body))
        try:
            response_stream = await aside(make_request, size_bytes=prompt_bytes)
        except StagemeshError as exc:
            self._socket.sender.reject(exc, size_bytes=prompt_bytes)
            raise
        response = Response(
            response_stream,
            settings,
            model,
            self._conversation if belongs else None,
            self._socket,
            prompt_bytes=prompt_bytes,
            metadata=body.metadata,
        )
        self._responses = [*self._running, response]
        if belongs:
            self._response = response
        await response.start(**update.warnings)

    def _make_request(self, model: Model, settings: Settings, items: Sequence[Item]) -> AsyncResponseStream:
        """Returns the request for a response. Blocks. Raises the errors of `AsyncClient.generate`."""
        arguments = settings.arguments(model)
        arguments["messages"] = list(to_messages(settings.instructions, items))
        if not arguments["messages"]:
            raise NotReadyError("the conversation is empty; create an item first", reason="EMPTY_TURN")
        if self._response is not None:
            # Their engines have the states of the conversation so far in their caches.
            arguments["preferred_replicas"] = self._response.replicas
        return model.client.generate(**arguments)

    @property
    def _running(self) -> list[Response]:
        return [each for each in self._responses if each.is_running]

    def _input(self, body: ResponseBody) -> Sequence[Item]:
        if body.input is None:
            return self._conversation.items
        items = [
            self._conversation.find(each.id, param="response.input.id") if isinstance(each, ItemReference) else each
            for each in body.input
        ]
        # Otherwise, a small event could have an item of many MiB copied thousands of times.
        if len({id(each) for each in items}) < len(items):
            raise ParameterError("response.input", "it refers to an item twice; refer to each once")
        return items

    async def _cancel(self, response_id: str | None) -> None:
        reason: CancelReason = "client_cancelled"
        for response in self._running:
            if response.id == response_id or (response_id is None and response is self._response):
                await response.cancel(reason)
                return
        name = "the conversation" if response_id is None else repr(response_id)
        # A client of livekit-agents recognizes the error by the start of its text, and ignores it.
        problem = f"Cancellation failed: no response of {name} is in progress"
        raise ParameterError(None, problem, code="response_cancel_not_active")


_RESPONSE_KEYS = ResponseBody.model_fields.keys()


router = APIRouter()


@router.websocket("/v1/realtime")
async def converse(websocket: WebSocket) -> None:
    """Holds a conversation. A connection that cannot be served is rejected with an HTTP status."""
    settings = await accept(websocket, _settings(websocket))
    if settings is not None:
        await Connection(websocket, settings).run()


async def _settings(websocket: WebSocket) -> Settings:
    """Returns the settings with which a conversation begins."""
    if not (model_id := websocket.query_params.get("model")):
        raise ParameterError("model", "it is missing; connect to /v1/realtime?model=NAME")
    model = await find_model(websocket, model_id)
    model.require_output("text")
    return Settings.initial(model)
