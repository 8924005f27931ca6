"""`/v1/audio/speech` and its WebSocket `/stream`: text in, and its speech out while it is made."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Literal, Self, TypeAlias, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, TypeAdapter, model_validator
from starlette.websockets import WebSocket

from stagemesh.client import (
    AsyncSession,
    AudioChunk,
    AudioFile,
    ConverseArguments,
    Event,
    Finished,
    GenerateArguments,
    OutputFinished,
    Part,
    TurnEnded,
)
from stagemesh.client.session_turns import SessionEvent
from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import EVENT_STREAM, sse, stream, token_counts
from stagemesh.gateway.audio import MEDIA_TYPES, PCM_RATE_HZ, AnswerEncoder, AudioFormat
from stagemesh.gateway.body import StageBody, VoiceId, aside, option_values, read_json, validate
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.content import Url, file_at
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.routes.voices import find_created_voice
from stagemesh.gateway.voices import Voice
from stagemesh.gateway.websockets import ClientEvent, JsonSocket, accept

router = APIRouter()


class VoiceBody(StageBody):
    """The parameters of a voice, which are options of the pipeline's stages."""

    rules = parameters.RULES["speech"]

    voice: VoiceId = None
    speaker: VoiceId = None
    """Another name of `voice`. If both are given, `voice` takes precedence."""
    instructions: str | None = None
    language: str | None = None
    ref_text: str | None = None
    """The text of the audio of a voice to clone."""
    speed: Annotated[float | None, Field(gt=0)] = None
    non_streaming_mode: bool | None = None
    """Whether the model reads the whole text before it speaks."""
    x_vector_only_mode: bool | None = None
    """Whether a clone has only the sound of the voice, without `ref_text`."""

    @model_validator(mode="after")
    def _apply_other_names(self) -> Self:
        self.voice = self.speaker if self.voice is None else self.voice
        if self.x_vector_only_mode:
            self.ref_text = None
        return self

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request, without the text."""
        arguments = self.stage_arguments(model)
        arguments["outputs"] = [model.require_output("audio")]
        own = option_values(model, self, *_OPTIONS)
        return arguments | {"options": {**self.options, **own}}


_OPTIONS = ("voice", "instructions", "language", "speed", "ref_text", "non_streaming_mode")
"""The parameters that are options of stages."""
_SAMPLED = {"temperature", "top_p", "top_k", "repetition_penalty"}


class SpeechBody(VoiceBody):
    """The body of a request for speech: the parameters of OpenAI's, vLLM-Omni's and SGLang-Omni's APIs."""

    input: Annotated[str, Field(min_length=1)]
    ref_audio: str | None = None
    """The voice to clone: a data URL, or the URI of an object in the pipeline's store."""
    response_format: AudioFormat = "mp3"
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    """By default "sse" if `stream` is true. The audio is sent while it is made in any case."""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    @property
    def is_sse(self) -> bool:
        """Whether the audio is sent as events."""
        return bool(self.stream) if self.stream_format is None else self.stream_format == "sse"

    def arguments(self, model: Model) -> GenerateArguments:
        given = self.model_dump(include=_SAMPLED, exclude_none=True)
        if self.max_new_tokens is not None:
            given["max_tokens"] = self.max_new_tokens
        if model.speaks_input or not model.chooses_tokens:
            for name in given:
                parameters.warn(name, "has no effect on this model, which samples no tokens for a speech")
            given = {}
        return super().arguments(model) | cast("GenerateArguments", given)

    def reference(self) -> Part | None:
        """Returns the audio of the voice to clone, or None if the request has none."""
        return None if self.ref_audio is None else file_at(Url(url=self.ref_audio), "ref_audio", kind="audio")

    def cloning(self, voice: Voice) -> "SpeechBody":
        """Returns the request with the text of a created voice instead of its name.

        Raises ParameterError if the request also has the audio or the text of a voice.
        """
        for name in ("ref_audio", "ref_text"):
            if getattr(self, name) is not None:
                raise ParameterError(name, f"it contradicts the created voice {voice.name!r}; send one of them")
        return self.model_copy(update={"voice": None, "ref_text": voice.ref_text})


@router.post("/v1/audio/speech")
async def create_speech(request: Request) -> Response:
    """Speaks a text. A pipeline whose language model would answer it speaks it without the language model."""
    body = await read_json(request, SpeechBody)
    model = await find_model(request, body.model)
    reference = await aside(body.reference, size_bytes=len(body.ref_audio or ""))
    created = None if body.voice is None else await find_created_voice(request, body.voice, model)
    if created is not None:
        body = body.cloning(created.voice)
        reference = AudioFile(created.audio, created.voice.media_type)
        request.scope["sender"].add(len(created.audio))
    arguments = body.arguments(model)
    events: AsyncGenerator[Event | SessionEvent]
    if reference is not None:
        events = aiter(model.client.generate([reference, body.input], **arguments))
    elif model.speaks_input:
        events = _spoken(model, body.input, arguments)
    else:
        events = aiter(model.client.generate(body.input, **arguments))
    media_type = EVENT_STREAM if body.is_sse else MEDIA_TYPES[body.response_format]
    sounding = _sounding(events)
    return await stream(request, sounding, lambda each: _parts(each, body, model), media_type=media_type)


async def _sounding(events: AsyncGenerator[Event | SessionEvent]) -> AsyncGenerator[Event | SessionEvent]:
    """Yields the events of a speech. Raises ParameterError (EMPTY_PROMPT) if the speech has no sound."""
    is_silent = True
    async with aclosing(events):
        async for event in events:
            if is_silent and isinstance(event, OutputFinished) and event.reason not in {"failed", "cancelled"}:
                raise ParameterError(
                    "input",
                    "the model makes no sound of it; send words that the voice can speak, not only symbols or another "
                    "script",
                    reason="EMPTY_PROMPT",
                )
            is_silent = is_silent and not (isinstance(event, AudioChunk) and event.samples.size)
            if not (is_silent and isinstance(event, AudioChunk)):
                yield event


def open_speech(model: Model, arguments: GenerateArguments) -> AsyncSession:
    """Returns a session in which each turn speaks the text that is appended."""
    names = ConverseArguments.__optional_keys__
    shared = cast("ConverseArguments", {name: value for name, value in arguments.items() if name in names})
    shared["input_mode"] = "stream"
    return model.client.converse(**shared)


async def _spoken(model: Model, text: str, arguments: GenerateArguments) -> AsyncGenerator[Event | SessionEvent]:
    """Yields the events of a session's turn, in which the text is spoken as it is."""
    async with open_speech(model, arguments) as session:
        await session.append(text)
        await session.commit()
        async with aclosing(session.answer()) as events:
            async for event in events:
                yield event


async def _parts(events: AsyncIterator[Event | SessionEvent], body: SpeechBody, model: Model) -> AsyncGenerator[bytes]:
    encoder = AnswerEncoder(body.response_format)

    def part(data: bytes) -> bytes:
        if not body.is_sse or not data:
            return data
        return sse({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})

    usage: dict[str, int] = {}
    async for event in events:
        if isinstance(event, AudioChunk):
            if data := part(await asyncio.to_thread(encoder.push, event)):
                yield data
        elif isinstance(event, Finished):
            usage = token_counts(event, model)
    if data := part(await asyncio.to_thread(encoder.finish)):
        yield data
    if body.is_sse:
        yield sse({"type": "speech.audio.done", "usage": usage})


class AppendText(ClientEvent):
    """Adds text to the utterance."""

    type: Literal["input.text"]
    text: str


class EndText(ClientEvent):
    """Ends the utterance and has its last words spoken, or drops it and stops its speech."""

    type: Literal["input.done", "input.clear"]


_Input: TypeAlias = AppendText | EndText
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
        await socket.serve(_INPUT, partial(_handle, session))
    finally:
        await end_tasks([sending])
        await session.close()


async def _open(websocket: WebSocket) -> AsyncSession:
    body = validate(VoiceBody, dict(websocket.query_params))
    model = await find_model(websocket, body.model)
    if not model.speaks_input:
        raise ParameterError("model", f"{body.model!r} speaks only whole texts; use /v1/audio/speech")
    if body.voice is not None and await find_created_voice(websocket, body.voice, model) is not None:
        raise ParameterError("voice", f"the created voice {body.voice!r} speaks only whole texts; use /v1/audio/speech")
    return await open_speech(model, body.arguments(model)).__aenter__()


async def _handle(session: AsyncSession, event: _Input) -> None:
    match event:
        case AppendText():
            await session.append(event.text)
        case EndText(type="input.done"):
            await session.commit()
        case EndText():
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
                        encoder = AnswerEncoder("pcm16")
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
