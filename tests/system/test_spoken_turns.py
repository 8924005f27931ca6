"""A client speaks to the tiny Qwen3-Omni of the examples, which detects the ends of its turns."""

import base64
import json
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import openai
import pytest

from stagemesh.client import (
    AudioFile,
    AudioSamples,
    Message,
    Session,
    SpeechDetected,
    StageArguments,
    Text,
    TurnCommitted,
    TurnDetection,
    TurnEnded,
    TurnInterrupted,
)
from tests.deployment import Deployment
from tests.gateway.making import serving
from tests.gateway.sounds import wav
from tests.gateway.talking import TOOL, Talker, connected
from tests.models.spoken import speak

pytestmark = pytest.mark.timeout(90)

RATE_HZ = 16_000
PIECE = RATE_HZ // 10
T = TypeVar("T")

GREEDY: StageArguments = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def speech() -> npt.NDArray[np.float32]:
    """Returns a question with a second of silence before it and after it, at 16 kHz."""
    spoken = speak("What time is it in Tokyo?", pause_s=1.0)
    times_s = np.arange(0, len(spoken) / 24_000, 1 / RATE_HZ)
    samples: npt.NDArray[np.float32] = np.interp(times_s, np.arange(len(spoken)) / 24_000, spoken).astype(np.float32)
    return samples


def _append(session: Session, audio: npt.NDArray[np.float32]) -> None:
    for start in range(0, len(audio), PIECE):
        session.append(AudioSamples(audio[start : start + PIECE], RATE_HZ))


class Heard:
    """The events of a session that a test has received."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.speech: list[SpeechDetected] = []
        self.text = ""

    def until(self, kind: type[T]) -> T:
        """Returns the next event of a kind."""
        for event in self._session:
            if isinstance(event, SpeechDetected):
                self.speech.append(event)
            if isinstance(event, Text):
                self.text += event.delta
            if isinstance(event, kind):
                return event
        raise AssertionError(f"the session ended before {kind}")


def test_a_turn_ends_with_its_speech(omni_up: Deployment, speech: npt.NDArray[np.float32]) -> None:
    with (
        omni_up.client() as client,
        client.converse(outputs=["text"], turn_detection={}, stages={"thinker": GREEDY}, seed=1) as session,
    ):
        _append(session, speech)
        heard = Heard(session)
        committed = heard.until(TurnCommitted)
        heard.until(TurnEnded)
        begin, end = heard.speech
        assert (begin.begins, end.begins) == (True, False)
        assert committed == TurnCommitted(turn=1, detected=True, audio_end_s=end.at_s)
        spoken = AudioSamples(speech[round(begin.at_s * RATE_HZ) : round(end.at_s * RATE_HZ)], RATE_HZ)
        messages = [Message("user", [spoken])]
        expected = client.generate(messages=messages, outputs=["text"], stages={"thinker": GREEDY}, seed=1).result()
    assert heard.text == expected.text


def test_speech_interrupts_an_answer(omni_up: Deployment, speech: npt.NDArray[np.float32]) -> None:
    endless: StageArguments = {"max_tokens": 1500, "ignore_eos": True}
    detection: TurnDetection = {"interrupts": True, "options": {"silence_ms": 300}}
    with (
        omni_up.client() as client,
        client.converse(outputs=["text"], turn_detection=detection, stages={"thinker": endless}) as session,
    ):
        _append(session, speech)
        heard = Heard(session)
        heard.until(Text)
        _append(session, speech)
        assert heard.until(TurnInterrupted).detected
        assert heard.until(TurnEnded).turn == 1
        assert heard.until(TurnCommitted).turn == 2
    assert [event.begins for event in heard.speech] == [True, False, True, False]


async def test_the_gateway_hears_and_is_interrupted(omni_up: Deployment, speech: npt.NDArray[np.float32]) -> None:
    samples = np.repeat(speech, 3)[::2]  # 24 kHz, of 16 kHz
    pcm = (samples * 32_767).astype(np.int16)

    async def say(talker: Talker) -> None:
        for start in range(0, len(pcm), 2_400):
            data = base64.b64encode(pcm[start : start + 2_400].tobytes()).decode()
            await talker.send("input_audio_buffer.append", audio=data)

    async with serving(omni_up.endpoint) as url, connected(url, model="qwen3-omni") as talker:
        detection = {"type": "server_vad", "silence_duration_ms": 300}
        stages = {"thinker": {"max_tokens": 1500, "ignore_eos": True}}
        audio = {"input": {"turn_detection": detection}}
        await talker.update(stages=stages, output_modalities=["text"], audio=audio)
        await say(talker)
        started = await talker.until("input_audio_buffer.speech_started")
        stopped = await talker.until("input_audio_buffer.speech_stopped")
        await talker.until("response.output_text.delta")
        await say(talker)
        response = (await talker.until("response.done"))["response"]
        assert response["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        second = await talker.until("input_audio_buffer.committed")
        await talker.until("response.output_text.delta")
        await talker.send("conversation.item.retrieve", item_id=second["item_id"])
        heard = (await talker.until("conversation.item.retrieved"))["item"]["content"][0]["audio"]
    spoken_ms = stopped["audio_end_ms"] - started["audio_start_ms"]
    assert 0.7 <= started["audio_start_ms"] / 1000 <= 1.1
    assert len(base64.b64decode(heard)) / 48 == pytest.approx(spoken_ms, abs=100)


async def test_the_gateway_transcribes_speech(omni_up: Deployment, speech: npt.NDArray[np.float32]) -> None:
    file = wav(speech)
    instruction = "Transcribe the audio into text. The language of the audio is en."
    with omni_up.client() as client:
        messages = [Message("user", [AudioFile(file, "audio/wav"), instruction])]
        expected = client.generate(messages=messages, outputs=["text"], temperature=0.0, max_tokens=12).result().text
        messages = [Message("user", [AudioFile(wav(0.5 * speech[::-1]), "audio/wav"), instruction])]
        other = client.generate(messages=messages, outputs=["text"], temperature=0.0, max_tokens=12).result().text
    assert expected
    assert other != expected
    async with serving(omni_up.endpoint) as url, openai.AsyncOpenAI(base_url=f"http://{url}/v1", api_key="none") as ai:
        arguments: dict[str, Any] = {
            "model": "qwen3-omni",
            "file": ("speech.wav", file),
            "language": "en",
            "extra_body": {"max_completion_tokens": 12},
        }
        whole = await ai.audio.transcriptions.create(**arguments)
        assert whole.text == expected
        assert whole.usage.output_tokens == 12
        events = [event async for event in await ai.audio.transcriptions.create(**arguments, stream=True)]
        assert "".join(event.delta for event in events[:-1]) == expected
        assert (events[-1].type, events[-1].text) == ("transcript.text.done", expected)
        assert len(events) > 2


async def test_a_realtime_conversation_has_a_tool_call_and_an_interruption(omni_up: Deployment) -> None:
    properties = {"zone": {"enum": ["Asia/Tokyo"]}}
    schema = {"type": "object", "properties": properties, "required": ["zone"], "additionalProperties": False}
    async with serving(omni_up.endpoint) as url, connected(url, model="qwen3-omni") as talker:

        async def answer(words: str | None = None, **changes: object) -> dict[str, Any]:
            await talker.update(**changes)
            if words is not None:
                await talker.say(words)
            response = await talker.respond()
            assert response["status"] in {"completed", "incomplete"}, response["status_details"]
            item: dict[str, Any] = response["output"][0]
            return item

        first = await answer("What is the sea?", stages={"thinker": GREEDY}, instructions="Answer briefly.")
        assert first["content"][0]["transcript"]
        assert "response.output_audio.delta" in {event["type"] for event in talker.received}
        called = await answer(
            "What time is it in Tokyo?",
            tools=[{**TOOL, "parameters": schema}],
            tool_choice="required",
            stages={"thinker": {"max_tokens": 200}},
        )
        assert (called["type"], called["name"]) == ("function_call", "read_clock")
        assert json.loads(called["arguments"]) == {"zone": "Asia/Tokyo"}
        result = {"type": "function_call_output", "call_id": called["call_id"], "output": "12:00"}
        await talker.send("conversation.item.create", item=result)
        await talker.until("conversation.item.done")
        assert (await answer(stages={"thinker": GREEDY}, tool_choice="none"))["content"][0]["transcript"]
        # Interrupted while it speaks, and truncated to a part of what was sent.
        endless = {"thinker": {"max_tokens": 400, "ignore_eos": True}, "talker": {"min_tokens": 300}}
        await talker.update(tools=[], tool_choice="auto", stages=endless)
        await talker.say("Tell me more.")
        await talker.send("response.create")
        sent_ms = 0.0
        while sent_ms < 300:
            sent_ms += len(base64.b64decode((await talker.until("response.output_audio.delta"))["delta"])) / 48
        await talker.send("response.cancel")
        stopped = (await talker.until("response.done"))["response"]
        assert stopped["status"] == "cancelled"
        item = stopped["output"][0]
        await talker.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=100)
        await talker.until("conversation.item.truncated")
        await talker.send("conversation.item.retrieve", item_id=item["id"])
        heard = (await talker.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
        sent = item["content"][0]["transcript"]
        assert sent.startswith(heard)
        assert len(heard) < len(sent)
        assert (await answer("Thank you.", stages={"thinker": GREEDY}))["content"][0]["transcript"]
