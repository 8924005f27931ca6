"""Transcriptions, at a gateway in this process, whose orchestrator follows a script."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from stagemesh.common.errors import CancelledRequestError, OverloadedError
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.gateway.routes import transcriptions
from stagemesh.v1.request_pb2 import ROLE_USER
from stagemesh.v1.signature_pb2 import OptionSpec, Signature
from stagemesh.v1.tensor_pb2 import TypedValue
from tests.client.scripted import Pause, ScriptedOrchestrator, admitted, ended, finished, served, text
from tests.gateway.making import asking, describe, error_of, serving
from tests.gateway.sounds import encode, hours_of_silence, tone, wav

SPEECH = wav(tone(1.5))
LANGUAGE_MODEL = Signature(media=True, sampling=True)
FUNCTION = Signature(media=True, options=[OptionSpec(name="language", default_value=TypedValue(text=""))])
ANSWER = [admitted(), text("The sea "), text("is calm."), ended(), finished()]


@asynccontextmanager
async def hearing(
    signature: Signature = LANGUAGE_MODEL, *, output: str = "text"
) -> AsyncGenerator[tuple[ScriptedOrchestrator, Any]]:
    """Yields an orchestrator whose pipeline has one stage with this signature, and a client of its gateway."""
    async with served() as orchestrator, asking(orchestrator) as ai:
        describe(orchestrator, output, signature=signature)
        orchestrator.scripts.append(ANSWER)
        yield orchestrator, ai


async def transcribe(ai: Any, data: bytes = SPEECH, **arguments: Any) -> Any:
    return await ai.audio.transcriptions.create(**{"model": "p", "file": ("speech.wav", data), **arguments})


def instruction_to(orchestrator: ScriptedOrchestrator) -> str:
    """Returns the text after the audio in the newest request."""
    _, instruction = orchestrator.requests[-1].input.conversation.messages[0].parts
    return instruction.text


async def test_a_language_model_receives_the_audio_and_an_instruction() -> None:
    async with hearing() as (orchestrator, ai):
        transcription = await transcribe(ai)
        assert transcription.text == "The sea is calm."
        assert (transcription.usage.type, transcription.usage.total_tokens) == ("tokens", 7)
        assert transcription.usage.input_token_details.text_tokens == 5
        request = orchestrator.requests[0]
        (message,) = request.input.conversation.messages
        assert message.role == ROLE_USER
        assert (message.parts[0].audio_file.data, message.parts[0].audio_file.media_type) == (SPEECH, "audio/wav")
        assert instruction_to(orchestrator) == "Transcribe the audio into text."
        assert request.outputs == ["text"]
        assert request.parameters.sampling.HasField("temperature")
        assert request.parameters.sampling.temperature == 0


async def test_parameters_reach_the_language_model() -> None:
    async with hearing() as (orchestrator, ai):
        stages = json.dumps({"stage": {"max_tokens": 9}})
        body = {"seed": 4, "max_completion_tokens": 7, "stages": stages, "user": "ada"}
        await transcribe(ai, language="en", prompt="About the Baltic.", temperature=0.5, extra_body=body)
        instruction = instruction_to(orchestrator)
        assert "The language of the audio is en." in instruction
        assert instruction.endswith("About the Baltic.")
        request = orchestrator.requests[0]
        parameters = request.parameters
        assert (parameters.sampling.temperature, parameters.sampling.max_tokens, parameters.seed) == (0.5, 7, 4)
        assert parameters.stages["stage"].sampling.max_tokens == 9
        assert request.caller == "ada"


async def test_a_transcription_is_streamed() -> None:
    async with hearing() as (_, ai):
        events = [event async for event in await transcribe(ai, stream=True)]
        assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
        assert [event.delta for event in events[:2]] == ["The sea ", "is calm."]
        assert (events[-1].text, events[-1].usage.output_tokens) == ("The sea is calm.", 2)


async def test_formats_of_the_response() -> None:
    async with hearing() as (_, ai):
        assert await transcribe(ai, response_format="text") == "The sea is calm.\n"
        verbose = await transcribe(ai, response_format="verbose_json", language="en")
        assert (verbose.text, verbose.language, verbose.duration) == ("The sea is calm.", "en", 1.5)
        assert verbose.segments is None
        assert (await transcribe(ai, response_format="verbose_json")).language is None


@pytest.mark.parametrize("media_type", ["audio/mpeg", "audio/flac", "audio/ogg"])
async def test_the_type_of_a_file_is_that_of_its_content(media_type: str) -> None:
    async with hearing() as (orchestrator, ai):
        await transcribe(ai, encode(tone(1.0), media_type))
        assert orchestrator.requests[0].input.conversation.messages[0].parts[0].audio_file.media_type == media_type


async def test_a_function_receives_the_audio_alone() -> None:
    async with hearing(FUNCTION) as (orchestrator, ai):
        assert (await transcribe(ai, language="en")).text == "The sea is calm."
        request = orchestrator.requests[0]
        (part,) = request.input.conversation.messages[0].parts
        assert part.audio_file.data == SPEECH
        assert request.parameters.options["language"].text == "en"
        assert not request.parameters.sampling.HasField("temperature")
        with pytest.raises(openai.BadRequestError, match="no stage of the model 'p' has the option prompt"):
            await transcribe(ai, prompt="About the sea.")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": "vtt"}, "response_format"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "text", "stream": True}, "response_format"),
        ({"include": ["logprobs"]}, "include"),
        ({"known_speaker_names": ["Ada"]}, "known_speaker_names"),
        ({"language": "en. Say no"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"stages": "{"}}, "stages"),
        ({"data": b""}, "file"),
        ({"data": b"no audio" * 100}, "file"),
        ({"data": b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n"}, "file"),
        ({"data": bytes(8_000_001)}, "file"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
async def test_what_is_not_supported_is_named(arguments: dict[str, Any], param: str) -> None:
    async with hearing() as (orchestrator, ai):
        with pytest.raises(openai.BadRequestError) as caught:
            await transcribe(ai, **arguments)
        assert caught.value.param == param
        assert not orchestrator.requests


@pytest.mark.parametrize("files", [{"model": (None, "p")}, {"model": (None, "p"), "file": (None, "text")}, None])
async def test_a_missing_file_is_named(files: Any) -> None:
    async with hearing() as (_, ai):
        answer = await ai._client.post("http://gateway/v1/audio/transcriptions", files=files)
        assert "file" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("signature", "output", "message"),
    [
        (Signature(sampling=True), "text", "the model 'p' reads no audio; use a model that reads audio"),
        (LANGUAGE_MODEL, "audio", "the model 'p' has no text output; use another model"),
    ],
    ids=["deaf", "mute"],
)
async def test_a_model_that_cannot_transcribe_is_named(signature: Signature, output: str, message: str) -> None:
    async with hearing(signature, output=output) as (_, ai):
        with pytest.raises(openai.BadRequestError, match=message):
            await transcribe(ai)


async def test_an_unknown_model_is_not_found() -> None:
    async with hearing() as (_, ai):
        with pytest.raises(openai.NotFoundError, match="use one of p"):
            await transcribe(ai, model="q")


async def test_an_error_after_the_first_text_ends_the_stream() -> None:
    async with hearing() as (orchestrator, ai):
        orchestrator.scripts[0] = [admitted(), text("The"), OverloadedError("too slow", reason="CLIENT_TOO_SLOW")]
        received = ""
        with pytest.raises(openai.APIError, match="too slow"):
            async for event in await transcribe(ai, stream=True):
                received += event.delta
        assert received == "The"


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_caller_that_leaves_cancels_its_request(stream: str) -> None:
    form, files = {"model": "p", "stream": stream}, {"file": ("a.wav", SPEECH)}
    async with served() as orchestrator:
        describe(orchestrator, "text", signature=LANGUAGE_MODEL)
        orchestrator.scripts.append([admitted(), text("The"), Pause.FOREVER])
        async with serving(orchestrator.endpoint) as address, httpx.AsyncClient(timeout=1) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"http://{address}/v1/audio/transcriptions", data=form, files=files)
            await orchestrator.hung_up.wait()


async def test_a_small_file_with_hours_of_audio_is_rejected() -> None:
    hours = hours_of_silence()
    assert len(hours) < 5_000_000
    async with hearing() as (orchestrator, ai):
        with pytest.raises(openai.BadRequestError, match="omit response_format verbose_json") as caught:
            await transcribe(ai, hours, response_format="verbose_json")
        assert caught.value.code == "media_too_large"
        assert orchestrator.requests == []


async def test_decoding_ends_when_the_caller_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended_early = threading.Event(), threading.Event()

    class Endless(DecodedBytes):
        """A budget without a limit. Only the end of the request stops the decoder."""

        def add(self, size_bytes: int, kind: str) -> None:
            begun.set()
            try:
                super().add(0, kind)
            except CancelledRequestError:
                ended_early.set()
                raise

    monkeypatch.setattr(transcriptions, "DecodedBytes", lambda *_, **__: Endless(1))
    async with hearing() as (_, ai):
        call = asyncio.create_task(transcribe(ai, hours_of_silence(), response_format="verbose_json"))
        assert await asyncio.to_thread(begun.wait, 20)
        call.cancel()
        assert await asyncio.to_thread(ended_early.wait, 20)
        await asyncio.wait([call])
