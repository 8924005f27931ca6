"""A server with OpenAI's HTTP API as the target of a load: streamed chat completions, or speech as PCM."""

import asyncio
import base64
import io
import wave
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Self

import httpx
import msgspec

from stagemesh.bench.measurements import Failure, Measurement
from stagemesh.bench.settings import Endpoint, HttpSettings
from stagemesh.bench.targets import Clock, MixedRequest
from stagemesh.common.errors import InvalidRequestError, NotFoundError, UnavailableError

_CONNECT_S = 10.0
_DATA, _DONE = "data:", "[DONE]"
_SAMPLE_BYTES = 2
_SHOWN_CHARACTERS = 200
_RETRIED = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})
"""The client errors that may not occur again."""


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    reason: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Audio(msgspec.Struct):
    data: str | None = None
    transcript: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    audio: _Audio | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    modality: str | None = None
    """The kind of `content` in a chunk of vLLM-Omni: "audio" for a WAV file in base64."""
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAITarget:
    """A server with OpenAI's API. Failed requests are not repeated."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {},
            # The load decides how many requests run, not the client.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(settings.timeout_s, connect=min(_CONNECT_S, settings.timeout_s)),
        )

    async def check(self) -> None:
        root, model = self._settings.root, self._settings.model
        try:
            answer = await self._client.get(f"{root}/models")
            one = await self._client.get(f"{root}/models/{model}")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise UnavailableError(
                f"no HTTP server answers at {root}: {exc or type(exc).__name__}; start it, or correct --openai URL",
                reason="UNAVAILABLE",
            ) from exc
        if answer.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise InvalidRequestError(
                f"the server at {root} rejects the API key: {_failure(answer).message}; set the environment variable "
                "that --api-key-env names"
            )
        # Some servers list no models, and some list a model without its adapters.
        listed = _listed_models(answer)
        if listed and model not in listed and not one.is_success:
            raise NotFoundError(
                f"the server at {root} has no model {model!r}; set --model to one of {', '.join(listed)}",
                reason="UNKNOWN_PIPELINE",
                metadata={"pipeline": model},
            )

    async def send(self, request: MixedRequest, measurement: Measurement, *, seed: int, clock: Clock) -> Failure | None:
        speaks = self._settings.endpoint is Endpoint.SPEECH
        path, body = self._speech(request) if speaks else self._chat(request, seed=seed)
        try:
            async with (
                asyncio.timeout(self._settings.timeout_s),
                self._client.stream("POST", f"{self._settings.root}/{path}", json=body) as answer,
            ):
                if not answer.is_success:
                    await answer.aread()
                    return _failure(answer)
                if not speaks:
                    return await self._read_chat(answer, measurement, clock)
                async for data in answer.aiter_bytes():
                    measurement.add_audio(clock(), duration_s=self._duration_s(data))
                return None
        except (TimeoutError, httpx.TimeoutException):
            return Failure("DEADLINE_EXCEEDED", "the request took longer than --timeout")
        except httpx.HTTPError as exc:
            return Failure("UNAVAILABLE", str(exc))
        except (ValueError, wave.Error) as exc:
            return Failure("MALFORMED_MESSAGE", str(exc))

    def _speech(self, request: MixedRequest) -> tuple[str, dict[str, object]]:
        body = {"model": self._settings.model, "input": request.prompt, "response_format": "pcm"}
        return "audio/speech", {**body, **self._settings.options, **request.options}

    def _chat(self, request: MixedRequest, *, seed: int) -> tuple[str, dict[str, object]]:
        settings = self._settings
        modalities = request.outputs or settings.modalities
        options: dict[str, object] = {**settings.options, **request.options}
        messages = [{"role": each.role, "content": each.content} for each in request.messages]
        body: dict[str, object] = {
            "model": settings.model,
            "messages": messages or [{"role": "user", "content": request.prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": seed,
        }
        if "audio" in modalities:
            voice = {"voice": options.pop("voice")} if "voice" in options else {}
            body |= {"modalities": list(modalities), "audio": {"format": "pcm16", **voice}}
        max_tokens = settings.max_tokens if request.max_tokens is None else request.max_tokens
        limits = {"max_tokens": max_tokens, "temperature": settings.temperature}
        body |= {name: value for name, value in limits.items() if value is not None}
        return "chat/completions", {**body, **options}

    async def _read_chat(self, answer: httpx.Response, measurement: Measurement, clock: Clock) -> Failure | None:
        tokens: int | None = None
        async for data in _events(answer):
            if data == _DONE:
                # A server that reports no usage sends about one token in each piece of text.
                measurement.output_tokens = len(measurement.texts_s) if tokens is None else tokens
                return None
            chunk = msgspec.json.decode(data, type=_Chunk)
            if chunk.error is not None:
                return _to_failure(chunk.error, default="STREAM_FAILED")
            for choice in chunk.choices:
                if choice.delta is not None:
                    self._record(choice.delta, measurement, now_s=clock(), modality=chunk.modality)
            if chunk.usage is not None and chunk.usage.completion_tokens is not None:
                tokens = chunk.usage.completion_tokens
        return Failure("UNAVAILABLE", f"the stream ended before {_DONE}")

    def _record(self, delta: _Delta, measurement: Measurement, *, now_s: float, modality: str | None) -> None:
        audio, text = delta.audio or _Audio(), delta.content
        if modality == "audio":
            audio, text = _Audio(data=delta.content), None
        if audio.data:
            measurement.add_audio(now_s, duration_s=self._duration_s(base64.b64decode(audio.data)))
        if text or audio.transcript or delta.reasoning or delta.reasoning_content:
            measurement.add_text(now_s)

    def _duration_s(self, data: bytes) -> float:
        """Returns the playing time of PCM with 16 bits and one channel, or of a WAV file, in seconds."""
        if not data.startswith(b"RIFF"):
            return len(data) / _SAMPLE_BYTES / self._settings.sample_rate_hz
        with wave.open(io.BytesIO(data)) as file:
            frame_bytes = file.getsampwidth() * file.getnchannels()
            # The header of a streamed file may state a length that is not known yet.
            frames = len(file.readframes(len(data) // frame_bytes)) // frame_bytes
            return float(frames / file.getframerate())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """Yields the data of server-sent events."""
    async for line in answer.aiter_lines():
        if line.startswith(_DATA):
            yield line.removeprefix(_DATA).strip()


def _listed_models(answer: httpx.Response) -> list[str]:
    """Returns the ids of the models in a list, or an empty list if the answer is not a list of models."""
    try:
        return [each.id for each in msgspec.json.decode(answer.content, type=_Models).data]
    except msgspec.DecodeError:
        return []


def _failure(answer: httpx.Response) -> Failure:
    """Returns the failure that an answer with an error status reports."""
    status = answer.status_code
    try:
        error = msgspec.json.decode(answer.content, type=_ErrorBody).error
    except msgspec.DecodeError:
        error = _Error(answer.text[:_SHOWN_CHARACTERS])
    failure = _to_failure(error, default=f"HTTP_{status}")
    return failure._replace(is_final=answer.is_client_error and status not in _RETRIED)


def _to_failure(error: _Error, *, default: str) -> Failure:
    """Returns the failure for an error in OpenAI's form. `default` is the reason if the error has no code.

    A gateway of Stagemesh also states the reason.
    """
    code = error.code.upper() if isinstance(error.code, str) else default
    return Failure(error.reason or code, error.message)
