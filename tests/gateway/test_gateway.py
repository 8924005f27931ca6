"""The gateway, driven by the official client of OpenAI's API, with a real orchestrator and a real stage."""

import base64
import io
import wave
from collections.abc import Iterator
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import ImageFile
from stagemesh.gateway.content import Url, file_at
from stagemesh.gateway.routes import models
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2
from tests.gateway.making import RATE_HZ, client, error_of, gateway, making
from tests.gateway.sounds import tone, wav
from tests.pictures import encoded_image

MODEL = "maker"
PNG = ("image.png", encoded_image(Image.new("RGB", (4, 4))), "image/png")


@pytest.fixture(scope="module")
def metrics_listen() -> str:
    return f"127.0.0.1:{PortPicker().pick()}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, metrics_listen: str) -> Iterator[str]:
    arguments = ("--metrics-listen", metrics_listen)
    with making(tmp_path_factory.mktemp("maker")) as up, gateway(up.endpoint, arguments=arguments) as url:
        yield url


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with client(url) as ai:
        yield ai


def chat(ai: openai.OpenAI, words: object, **arguments: Any) -> Any:
    """Sends a user's message, and returns the answer."""
    create: Any = ai.chat.completions.create
    return create(model=MODEL, messages=[{"role": "user", "content": words}], **arguments)


def test_models_are_pipelines(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).owned_by == "stagemesh"
    with pytest.raises(openai.NotFoundError, match="use one of maker") as caught:
        ai.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_conversation_is_answered(ai: openai.OpenAI) -> None:
    answer = chat(ai, "red green")
    message = answer.choices[0].message
    assert (message.content, message.role, message.audio) == ("alto: red green ", "assistant", None)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None


def test_a_streamed_answer_is_the_same(ai: openai.OpenAI) -> None:
    chunks = list(chat(ai, "red green", stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas[1:-1]] == ["alto: ", "red ", "green "]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_answer_is_spoken(ai: openai.OpenAI) -> None:
    answer = chat(ai, "red", modalities=["text", "audio"], audio={"voice": "bass", "format": "wav"})
    message = answer.choices[0].message
    assert (message.content, message.audio.transcript) == (None, "bass: red ")
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert file.getframerate() == RATE_HZ
        samples = np.frombuffer(file.readframes(1 << 20), np.int16)
    tone = np.sin(np.arange(RATE_HZ // 10) / 20)
    assert len(samples) == RATE_HZ // 5
    np.testing.assert_allclose(samples / 32768, np.tile(tone, 2), atol=2e-3)


def test_a_streamed_answer_is_spoken_in_pcm(ai: openai.OpenAI) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "alto", "format": "pcm16"}}
    stream = chat(ai, "red", **spoken, stream=True)
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in stream if chunk.choices]
    audio = [delta["audio"] for delta in deltas if delta.get("audio")]
    assert "".join(part.get("transcript", "") for part in audio) == "alto: red "
    pcm = b"".join(base64.b64decode(part["data"]) for part in audio if "data" in part)
    assert len(pcm) / 2 / 24_000 == pytest.approx(0.2, abs=0.002)
    assert len({part["id"] for part in audio}) == 1


def test_choices_have_their_index(ai: openai.OpenAI) -> None:
    answer = chat(ai, "red", n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.content for choice in answer.choices} == {"alto: red "}


def test_media_are_parts_of_a_message(ai: openai.OpenAI) -> None:
    image, sound = (base64.b64encode(data).decode() for data in (PNG[1], wav(tone(0.1))))
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]
    assert chat(ai, parts).choices[0].message.content == "alto: see image audio "


def test_several_prompts_have_their_choices_in_order(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model=MODEL, prompt=[*"abcdefghij"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (at, f"alto: {'abcdefghij'[at // 2]} ") for at in range(20)
    ]
    with pytest.raises(openai.BadRequestError, match="answered as a whole"):
        ai.completions.create(model=MODEL, prompt=["red", "green"], stream=True)


def test_a_completion_continues_its_prompt(ai: openai.OpenAI) -> None:
    assert ai.completions.create(model=MODEL, prompt="red").choices[0].text == "alto: red "
    stream = ai.completions.create(model=MODEL, prompt="red", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "alto: red "


@pytest.mark.parametrize(
    ("audio_format", "begins"),
    [("wav", b"RIFF"), ("mp3", b"\xff"), ("flac", b"fLaC"), ("opus", b"OggS"), ("aac", b"\xff"), ("pcm", b"")],
)
def test_speech_has_the_format(ai: openai.OpenAI, audio_format: str, begins: bytes) -> None:
    create: Any = ai.audio.speech.create
    speech = create(model=MODEL, voice="bass", input="red", speed=2, response_format=audio_format)
    assert speech.content.startswith(begins)
    assert len(speech.content) > 500


def test_speech_is_streamed_as_events(ai: openai.OpenAI) -> None:
    with ai.audio.speech.with_streaming_response.create(
        model=MODEL, voice="bass", input="red", response_format="pcm", stream_format="sse"
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert '"type":"speech.audio.delta"' in lines[0]
    assert '"type":"speech.audio.done"' in lines[-1]


def test_a_function_transcribes_audio(ai: openai.OpenAI) -> None:
    sound = ("speech.wav", wav(tone(0.2)))
    assert ai.audio.transcriptions.create(model=MODEL, file=sound).text.split() == ["alto:", "audio"]
    events = list(ai.audio.transcriptions.create(model=MODEL, file=sound, stream=True))
    assert (events[-1].type, len(events)) == ("transcript.text.done", 4)
    with pytest.raises(openai.BadRequestError, match="without sampling parameters"):
        ai.audio.transcriptions.create(model=MODEL, file=sound, temperature=0)


def test_images_have_the_size(ai: openai.OpenAI) -> None:
    answer = ai.images.generate(model=MODEL, prompt="red", size="16x24", n=2)
    images = [Image.open(io.BytesIO(base64.b64decode(each.b64_json or ""))) for each in answer.data or ()]
    assert [image.size for image in images] == [(16, 24)] * 2
    events = list(ai.images.generate(model=MODEL, prompt="red", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_generation.completed"]


def test_images_are_edited(ai: openai.OpenAI, url: str) -> None:
    answer = ai.images.edit(model=MODEL, image=[PNG, PNG], prompt="red", size="16x16", n=2)
    images = [Image.open(io.BytesIO(base64.b64decode(each.b64_json or ""))) for each in answer.data or ()]
    assert [(image.size, image.getpixel((0, 0))) for image in images] == [((16, 16), (200, 0, 200))] * 2
    form = {"model": MODEL, "prompt": "red", "sharpness": "3"}
    for files, fields, param in (
        ({"image": PNG}, form, "sharpness"),
        ({"mask": PNG}, {}, "mask"),
        ({"image": ("a.txt", b"text", "text/plain")}, {}, "image"),
        ({}, {"model": MODEL}, "image"),
    ):
        error = httpx.post(f"{url}/v1/images/edits", files=files, data={"model": MODEL, "prompt": "x"} | fields)
        assert error_of(error)["param"] == param


TOOL = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"logit_bias": {"1": 1}}, "logit_bias", "not supported"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"audio": {"format": "wav"}}, "audio", "modalities"),
        ({"options": {"tempo": 3}}, None, "tempo"),
        ({"tool_choice": "required"}, "tools", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice", "contra"),
        ({"max_tokens": 5}, None, "without sampling parameters"),
    ],
)
def test_what_is_not_supported_is_named(url: str, change: dict[str, object], param: str | None, message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "red"}], **change}
    error = error_of(httpx.post(f"{url}/v1/chat/completions", json=body))
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,###"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "fetches nothing"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ==YQ=="}}, "data after its padding"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJjZ"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,%89PNG"}}, "data:image/TYPE"),
        *(
            ({"type": "image_url", "image_url": {"url": f"data:{kind};base64,YQ=="}}, "send image/TYPE")
            for kind in ("text/plain", "audio/wav", "video/mp4")
        ),
        ({"type": "input_audio", "input_audio": {"data": "YQ==", "format": "midi"}}, "'midi' is unknown"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "is empty"),
    ],
)
def test_bad_media_are_rejected(url: str, part: object, message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    error = error_of(httpx.post(f"{url}/v1/chat/completions", json=body))
    assert message in error["message"]
    assert error["param"].startswith("messages.0.content.0.")


@pytest.mark.parametrize(
    "url",
    [
        "data:image/jpg;base64,+/8=",
        "data:application/octet-stream;base64,+/8",
        "data:;base64,-_8",
        "DATA:IMAGE/PNG;charset=utf-8;name=a.png;BASE64,+/\n 8=\r\n",
        " data:image/png; base64,%2B%2F8%3D",
        f"data:image/png;base64,\n{'A' * 262_144}+/8=",
    ],
    ids=lambda url: url[:60],
)
def test_data_urls_are_read_as_people_write_them(url: str) -> None:
    file = file_at(Url(url=url), "image_url", kind="image")
    assert isinstance(file, ImageFile)
    assert file.data.removeprefix(bytes(196_608)) == b"\xfb\xff"


def test_malformed_json_and_unknown_paths_have_errors(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert "not JSON" in error_of(answer)["message"]
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{url}/v1/chat/completions").status_code == 405


def test_a_failing_stage_is_an_error_also_in_a_stream(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="no such word") as caught:
        chat(ai, "fail")
    assert caught.value.code == "engine_error"
    with pytest.raises(openai.APIError, match="no such word"):
        list(chat(ai, "fail", stream=True))


def test_a_speech_that_fails_before_its_first_sound_has_a_status(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="no such word"):
        ai.audio.speech.create(model=MODEL, voice="alto", input="fail")
    with pytest.raises(openai.BadRequestError, match="'tenor'"):
        ai.audio.speech.create(model=MODEL, voice="tenor", input="red")


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_a_speech_without_sound_is_an_error(ai: openai.OpenAI, stream_format: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no sound of it; send words") as caught:
        ai.audio.speech.create(model=MODEL, voice="alto", input="…", stream_format=stream_format)
    assert (caught.value.code, caught.value.param) == ("empty_prompt", "input")


def test_metrics_count_requests_and_have_their_own_port(url: str, metrics_listen: str, ai: openai.OpenAI) -> None:
    chat(ai, "red")
    httpx.get(f"{url}/v1/nothing")
    assert httpx.get(f"{url}/metrics").status_code == 404
    text = httpx.get(f"http://{metrics_listen}/metrics").text
    assert 'stagemesh_gateway_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert 'stagemesh_gateway_requests_total{endpoint="other",status="404"}' in text
    assert "process_cpu_seconds_total" in text


def test_connectors_and_states_that_the_gateway_does_not_know_are_shown_as_numbers() -> None:
    link = orchestrator_pb2.EdgeLink(connector=cast("chunk_pb2.Connector.ValueType", 1000))
    replica = orchestrator_pb2.ReplicaStatus(state=cast("stage_pb2.ReplicaState.ValueType", 99))
    assert models._link(link)["connector"] == "connector 1000"
    assert models._replica(replica)["state"] == "99"
