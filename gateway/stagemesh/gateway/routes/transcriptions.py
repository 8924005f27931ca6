"""`/v1/audio/transcriptions`: speech in, and its text out."""

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field, field_validator

from stagemesh.client import AudioFile, Event, Finished, GenerateArguments, Message, Text
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import sse, stream, token_counts, until_disconnected
from stagemesh.gateway.audio import decode, find_media_type, measure
from stagemesh.gateway.body import SamplingBody, aside, check_keys, decode_json, option_values, read_form, validate
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.errors import ParameterError

router = APIRouter()

_FILE = "file"
_MAX_BYTES = 8_000_000
"""The largest audio file. A request to a pipeline has 8 MiB."""
MAX_DECODED_BYTES = 1 << 30
"""The limit for the decoded audio of one request, all channels as float32: 93 minutes of one channel at 48 kHz."""
_REMEDY = "omit response_format verbose_json, which needs the audio's length"
_INSTRUCTION = "Transcribe the audio into text."


class TranscriptionBody(SamplingBody):
    """The fields of a form that asks for a transcription: OpenAI's, and those of all requests as far as they apply."""

    rules = parameters.RULES["transcriptions"]

    language: Annotated[str | None, Field(pattern=r"^[A-Za-z][A-Za-z -]{0,39}$")] = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    max_completion_tokens: int | None = None

    @field_validator("options", "stages", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        """Returns the object of a field, which a form contains as JSON."""
        try:
            parsed = decode_json(value.encode(), fault="it is not JSON") if isinstance(value, str) else value
        except InvalidRequestError as exc:
            raise ValueError(exc.message) from exc
        check_keys(parsed)
        return parsed

    def arguments(self, model: Model, audio: AudioFile) -> GenerateArguments:
        """Returns the arguments of the client for this request, without the prompt of a pipeline without messages."""
        if self.n not in {None, 1}:
            raise ParameterError("n", "a transcription is one text; omit it")
        arguments = self.sampling_arguments(model, max_tokens=self.max_completion_tokens)
        arguments["outputs"] = [model.require_output("text")]
        if model.converses_about_media:
            arguments["messages"] = [Message("user", [audio, self._instruction()])]
            # The most probable text, as OpenAI's API returns it by default.
            arguments.setdefault("temperature", 0.0)
            return arguments
        return arguments | {"options": {**self.options, **option_values(model, self, "language", "prompt")}}

    def _instruction(self) -> str:
        """Returns the instruction to a language model."""
        parts = [_INSTRUCTION]
        if self.language:
            parts.append(f"The language of the audio is {self.language}.")
        if self.prompt:
            parts.append(f"Context, which is not part of the audio: {self.prompt}")
        return " ".join(parts)


@router.post("/v1/audio/transcriptions")
async def create_transcription(request: Request) -> Response:
    """Transcribes speech. The body is a form with the file `file`."""
    form = await read_form(request, file=_FILE, max_bytes=_MAX_BYTES)
    data = form.files[0].data
    size_bytes = sum(map(len, form.fields.values()))
    body = await aside(partial(validate, TranscriptionBody, form.fields), size_bytes=size_bytes)
    if body.stream and body.response_format != "json":
        raise ParameterError("response_format", f"a stream has json alone, but it is {body.response_format!r}")
    model = await find_model(request, body.model)
    if not model.reads_media:
        raise ParameterError("model", f"the model {model.id!r} reads no audio; use a model that reads audio")
    decoded, details = DecodedBytes(MAX_DECODED_BYTES, remedy=_REMEDY), dict[str, Any]()
    if body.response_format == "verbose_json":
        measured = await decode(request, partial(measure, data, param=_FILE, decoded=decoded), decoded)
        media_type = measured.media_type
        details = {"task": "transcribe", "language": body.language, "duration": round(measured.duration_s, 3)}
    else:
        media_type = await decode(request, partial(find_media_type, data, param=_FILE), decoded)
    audio = AudioFile(data, media_type)
    arguments = body.arguments(model, audio)
    events = model.client.generate(None if "messages" in arguments else [audio], **arguments)
    if body.stream:
        return await stream(request, aiter(events), lambda events: _events(events, model))
    result = await until_disconnected(request, events.result())
    if body.response_format == "text":
        return PlainTextResponse(f"{result.text}\n")
    usage = _usage(result.finished, model)
    return JSONResponse({**details, "text": result.text, "usage": usage, **parameters.warnings_field()})


async def _events(events: AsyncIterator[Event], model: Model) -> AsyncGenerator[bytes]:
    """Yields the events of a stream."""
    text = list[str]()
    async for event in events:
        if isinstance(event, Text) and event.delta:
            text.append(event.delta)
            yield sse({"type": "transcript.text.delta", "delta": event.delta})
        elif isinstance(event, Finished):
            yield sse({"type": "transcript.text.done", "text": "".join(text), "usage": _usage(event, model)})


def _usage(finished: Finished, model: Model) -> dict[str, Any]:
    counts = token_counts(finished, model)
    audio = min(counts["input_tokens"], sum(each.media_tokens for each in finished.usage.values()))
    details = {"audio_tokens": audio, "text_tokens": counts["input_tokens"] - audio}
    return {"type": "tokens", **counts, "input_token_details": details}
