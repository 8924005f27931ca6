"""`/v1/audio/speech`: text in, and its speech out, as a file that is sent while it is made, or as events."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from stagemesh.client import AudioChunk, ConverseArguments, Event, Finished, GenerateArguments, OutputFinished
from stagemesh.client.sessions.events import SessionEvent
from stagemesh.gateway.answers import EVENT_STREAM, sse, stream, usage_of
from stagemesh.gateway.audio_formats import MEDIA_TYPES, AudioFormat, make_encoder
from stagemesh.gateway.body import StageBody
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.state import find_model

router = APIRouter()


class SpeechBody(StageBody):
    """The body of a request for speech. `language` and further options are those of the pipeline's stages."""

    input: Annotated[str, Field(min_length=1)]
    voice: str | None = None
    instructions: str | None = None
    language: str | None = None
    response_format: AudioFormat = "mp3"
    speed: Annotated[float | None, Field(gt=0)] = None
    stream_format: Literal["audio", "sse"] = "audio"

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request, without the text."""
        arguments = self.stage_arguments(model)
        arguments["outputs"] = [model.require_output("audio")]
        options = dict(arguments.get("options", {}))
        for name, value in self._options().items():
            model.require_option(name, param=name)
            options[name] = value
        return arguments | {"options": options}

    def _options(self) -> dict[str, str | float]:
        given = {"voice": self.voice, "instructions": self.instructions, "language": self.language, "speed": self.speed}
        return {name: value for name, value in given.items() if value is not None}


@router.post("/v1/audio/speech")
async def create_speech(body: SpeechBody, request: Request) -> Response:
    """Speaks a text. A pipeline whose language model would answer it speaks it without the language model."""
    model = await find_model(request, body.model)
    arguments = body.arguments(model)
    if model.speaks_input:
        events = _spoken(model, body.input, arguments)
    else:
        events = aiter(model.client.generate(body.input, **arguments))
    media_type = EVENT_STREAM if body.stream_format == "sse" else MEDIA_TYPES[body.response_format]
    return await stream(
        request,
        events,
        lambda each: _parts(each, body, model),
        media_type=media_type,
        begins=_begins,
    )


def _begins(event: Event | SessionEvent) -> bool:
    """Returns whether the event is the first sound, or the end of a speech without one."""
    if isinstance(event, OutputFinished):
        return event.reason not in {"failed", "cancelled"}
    return isinstance(event, AudioChunk)


async def _spoken(model: Model, text: str, arguments: GenerateArguments) -> AsyncGenerator[Event | SessionEvent]:
    """Yields the events of a session's turn, in which the text is spoken as it is."""
    names = ConverseArguments.__optional_keys__
    shared = cast("ConverseArguments", {name: value for name, value in arguments.items() if name in names})
    shared["input_mode"] = "stream"
    async with model.client.converse(**shared) as session:
        await session.append(text)
        await session.commit()
        async with aclosing(session.answer()) as events:
            async for event in events:
                yield event


async def _parts(events: AsyncIterator[Event | SessionEvent], body: SpeechBody, model: Model) -> AsyncGenerator[bytes]:
    encoder = make_encoder(body.response_format)
    is_sse = body.stream_format == "sse"

    def part(data: bytes) -> bytes:
        if not is_sse or not data:
            return data
        return sse({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})

    usage: dict[str, object] = {}
    async for event in events:
        if isinstance(event, AudioChunk):
            if data := part(encoder.push(event)):
                yield data
        elif isinstance(event, Finished):
            found = usage_of(event, model)
            usage = {
                "input_tokens": found["prompt_tokens"],
                "output_tokens": found["completion_tokens"],
                "total_tokens": found["total_tokens"],
            }
    if data := part(encoder.finish()):
        yield data
    if is_sse:
        yield sse({"type": "speech.audio.done", "usage": usage})
