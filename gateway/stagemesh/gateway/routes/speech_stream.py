"""`/v1/audio/speech/stream`: a WebSocket on which text arrives piece by piece, and its speech leaves meanwhile."""

import asyncio
from contextlib import aclosing, suppress
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter
from pydantic import Field, TypeAdapter
from starlette.websockets import WebSocket

from stagemesh.client import AsyncSession, AudioChunk, TurnEnded
from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.gateway.audio_formats import PCM_RATE_HZ, make_encoder
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.json_socket import ClientEvent, JsonSocket, accept
from stagemesh.gateway.routes.speech import VoiceBody, open_speech
from stagemesh.gateway.routes.voices import find_created_voice
from stagemesh.gateway.state import find_model

router = APIRouter()


class AppendText(ClientEvent):
    """Adds text to the utterance."""

    type: Literal["input.text"]
    text: str


class EndText(ClientEvent):
    """Ends the utterance, so that its last words are spoken."""

    type: Literal["input.done"]


class ClearText(ClientEvent):
    """Drops the utterance, and stops its speech."""

    type: Literal["input.clear"]


_Input: TypeAlias = AppendText | EndText | ClearText
_INPUT: TypeAdapter[_Input] = TypeAdapter(Annotated[_Input, Field(discriminator="type")])


@router.websocket("/v1/audio/speech/stream")
async def stream_speech(websocket: WebSocket) -> None:
    """Speaks utterances, one after the other. The parameters of the voice are those of the URL."""
    session = await accept(websocket, _open(websocket))
    if session is None:
        return
    socket = JsonSocket(websocket)
    sending = asyncio.create_task(_send_speech(session, socket))
    try:
        async with aclosing(socket.events(_INPUT)) as events:
            async for event in events:
                try:
                    await _handle(event, session)
                except StagemeshError as exc:
                    await socket.send_error(exc, cause=event.event_id)
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        await session.close()


async def _open(websocket: WebSocket) -> AsyncSession:
    body = VoiceBody.model_validate(dict(websocket.query_params))
    model = await find_model(websocket, body.model)
    if not model.speaks_input:
        raise ParameterError("model", f"{body.model!r} speaks only whole texts; use /v1/audio/speech")
    if body.voice is not None and await find_created_voice(websocket, body.voice, model) is not None:
        raise ParameterError("voice", f"the created voice {body.voice!r} speaks only whole texts; use /v1/audio/speech")
    return await open_speech(model, body.arguments(model)).__aenter__()


async def _handle(event: _Input, session: AsyncSession) -> None:
    match event:
        case AppendText():
            await session.append(event.text)
        case EndText():
            await session.commit()
        case ClearText():
            await session.clear()
            # There is nothing to stop if no utterance is being spoken.
            with suppress(NotReadyError):
                await session.interrupt()


async def _send_speech(session: AsyncSession, socket: JsonSocket) -> None:
    """Sends each utterance: its first event, its audio in binary frames, and its last event."""
    encoder = None
    try:
        async for event in session:
            match event:
                case AudioChunk():
                    if encoder is None:
                        encoder = make_encoder("pcm16")
                        await socket.send("audio.start", format="pcm16", sample_rate=PCM_RATE_HZ)
                    await socket.send_bytes(encoder.push(event))
                case TurnEnded():
                    if encoder is not None and (rest := encoder.finish()):
                        await socket.send_bytes(rest)
                    encoder = None
                    if event.error is not None:
                        await socket.send_error(event.error)
                    await socket.send("audio.done")
                case _:
                    pass
    except StagemeshError as exc:
        await socket.send_error(exc)
