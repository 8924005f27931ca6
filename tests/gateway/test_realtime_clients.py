"""Stock clients of the realtime API, and their first events: settings are updated part by part."""

import base64
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import websockets
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import TypeAdapter

from stagemesh.gateway.config import Aliases
from stagemesh.gateway.realtime.g711 import G711
from stagemesh.v1.signature_pb2 import OptionSpec, Signature
from tests.client.scripted import Pause, Script, ScriptedOrchestrator, admitted, served, text
from tests.gateway.making import describe
from tests.gateway.talking import CALL, RATE_HZ, TOOL, Talker, connected, conversing, messages, spoken, wav_samples

PCM = {"type": "audio/pcm", "rate": RATE_HZ}
TRANSCRIPTION = {"model": "gpt-4o-mini-transcribe"}
SEMANTIC = {"type": "semantic_vad", "interrupt_response": False}
COMMON: Mapping[str, Any] = {"type": "realtime", "instructions": "Be brief.", "tools": [TOOL]}
SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)

UPDATES: Mapping[str, tuple[Mapping[str, Any], set[str]]] = {
    "openai-agents": (
        {
            **COMMON,
            "model": "gpt-realtime",
            "output_modalities": ["audio"],
            "audio": {
                "input": {"format": PCM, "transcription": TRANSCRIPTION, "turn_detection": SEMANTIC},
                "output": {"format": PCM, "voice": "ash"},
            },
            "tracing": {"workflow_name": "w", "group_id": None},
        },
        {"model", "audio.input.transcription", "audio.input.turn_detection", "audio.output.voice", "tracing"},
    ),
    "@openai/agents": (
        {
            **COMMON,
            "model": "gpt-realtime-2.1",
            "output_modalities": ["audio"],
            "audio": {
                "input": {
                    "format": PCM,
                    "noise_reduction": None,
                    "transcription": TRANSCRIPTION,
                    "turn_detection": SEMANTIC,
                },
                "output": {"format": PCM, "speed": 1},
            },
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
        },
        {"model", "audio.input.transcription", "audio.input.turn_detection", "reasoning"},
    ),
    "pipecat": (
        {
            **COMMON,
            "audio": {
                "input": {
                    "transcription": {"model": "gpt-realtime-whisper"},
                    "noise_reduction": {"type": "near_field"},
                    "turn_detection": SEMANTIC,
                }
            },
            "include": ["item.input_audio_transcription.logprobs"],
            "truncation": {"type": "retention_ratio", "retention_ratio": 0.8},
        },
        {
            *("audio.input.transcription", "audio.input.noise_reduction", "audio.input.turn_detection"),
            *("include", "truncation"),
        },
    ),
    "sglang-omni": (
        {
            "modalities": ["text", "audio"],
            "instructions": "Be brief.",
            "input_audio_format": "pcm16",
            "output_audio_format": "pcm16",
            "turn_detection": SEMANTIC,
            "temperature": 0.8,
            "max_response_output_tokens": "inf",
            "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
        },
        {"audio.input.turn_detection", "temperature"},
    ),
}


@asynccontextmanager
async def connected_raw(url: str, **options: Any) -> AsyncGenerator[Talker]:
    """Yields a client that sends JSON on a WebSocket, opened with these options, to a gateway."""
    async with websockets.connect(f"ws://{url}/v1/realtime?model=p", **options) as socket:
        yield Talker(_Connection(socket))  # type: ignore[arg-type]


@asynccontextmanager
async def raw(*scripts: Script, **options: Any) -> AsyncGenerator[tuple[ScriptedOrchestrator, Talker]]:
    """Yields an orchestrator, and a client as `connected_raw` has it."""
    async with (
        served() as orchestrator,
        conversing(orchestrator, *scripts) as url,
        connected_raw(url, **options) as talker,
    ):
        yield orchestrator, talker


class _Event(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return self


class _Connection:
    """A WebSocket with the methods of OpenAI's connection that `Talker` uses."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket

    async def send(self, event: Any) -> None:
        await self._socket.send(json.dumps(event))

    async def recv(self) -> _Event:
        return _Event(json.loads(await self._socket.recv()))


@pytest.mark.parametrize("detects_turns", [False, True])
@pytest.mark.parametrize("name", UPDATES)
async def test_the_settings_of_a_stock_client_are_in_force_without_the_ignored_ones(
    name: str, detects_turns: bool
) -> None:
    session, ignored = UPDATES[name]
    async with served() as orchestrator, conversing(orchestrator, spoken("Yes.")) as url:
        describe(orchestrator, "text", "audio", detects_turns=detects_turns)
        # OpenAI's client warns of events of the beta.
        async with (connected_raw if "modalities" in session else connected)(url) as talker:
            await talker.send("session.update", session=session)
            updated = await talker.until("session.updated")
            await talker.say("Hello")
            await talker.respond()
    if detects_turns:
        ignored = ignored - {"audio.input.turn_detection"} | {"audio.input.turn_detection.type"}
    assert {each["param"] for each in updated["warnings"]} == {f"session.{part}" for part in ignored}
    assert messages(orchestrator) == [("system", "Be brief."), ("user", "Hello")]
    tool = orchestrator.requests[0].input.conversation.tools[0]
    assert (tool.name, tool.strict) == ("read_clock", name == "sglang-omni")
    settings = updated["session"]
    assert settings["model"] == "p"
    vad = (settings["audio"]["input"] if "audio" in settings else settings)["turn_detection"]
    assert (vad and (vad["type"], vad["interrupt_response"])) == (("server_vad", False) if detects_turns else None)
    assert settings.get("tracing") is None


async def test_every_event_has_the_types_of_openai() -> None:
    script: Script = [admitted(), text("so"), Pause.FOREVER]
    async with raw(spoken(*CALL), spoken("Yes."), script) as (_, talker):
        await talker.send("session.update", session=UPDATES["pipecat"][0])
        await talker.say("Hello")
        await talker.respond()
        await talker.respond()
        await talker.send("response.create")
        await talker.until("response.output_audio_transcript.delta")
        await talker.send("response.cancel")
        # Clients read the usage of a cancelled response.
        assert (await talker.until("response.done"))["response"]["usage"]["total_tokens"] == 0
        await talker.send("response.cancel")
        await talker.error()
    for event in talker.received:
        SERVER_EVENT.validate_python({**event, "previous_item_id": event.get("previous_item_id") or ""})


async def test_settings_and_items_are_accepted_as_they_were_sent(caplog: pytest.LogCaptureFixture) -> None:
    async with raw(spoken("Good.", *CALL), spoken("Bye.")) as (orchestrator, talker):
        await talker.send("session.update", session=UPDATES["openai-agents"][0])
        first = await talker.until("session.updated")
        assert "'tracing' is not supported and was ignored" in caplog.text
        await talker.send("session.update", session={**first["session"], "expires_at": 0})
        again = await talker.until("session.updated")
        assert again["session"] == first["session"]
        assert "warnings" not in again
        await talker.say("Hello")
        await talker.respond()
        added, done = (
            {
                each["item"]["id"]: each["item"]
                for each in talker.received
                if each["type"] == f"conversation.item.{step}"
            }
            for step in ("added", "done")
        )
        assert [done[key]["type"] for key in added] == ["message", "message", "function_call"]
        for key in added:
            await talker.send("conversation.item.create", item={**done[key], "id": None})
            await talker.until("conversation.item.done")
        await talker.respond()
        prompt = messages(orchestrator)
        assert prompt[1:3] * 2 == prompt[1:]


WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "unknown": ({"loudness": 3}, "loudness"),
    "model": ({"model": "other"}, "model"),
    "type": ({"tool_choice": None, "parallel_tool_calls": "maybe"}, "parallel_tool_calls"),
    "format": ({"audio": {"output": {"format": {"type": "audio/opus"}}}}, "audio.output.format.type"),
    "rate": ({"audio": {"output": {"format": {"type": "audio/pcm", "rate": 16_000}}}}, "audio.output.format"),
    "modality": ({"output_modalities": ["video"]}, "output_modalities.0"),
    "voice": ({"audio": {"output": {"voice": "alto"}}}, "audio.output.voice"),
    "tools": ({"tools": [{"type": "mcp", "name": "x"}]}, "tools.0.type"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "audio": ({"audio": 3}, "audio"),
    # Otherwise, the model ignores these.
    "temperature": ({"temperature": "hot"}, "temperature"),
    "truncation": ({"truncation": 3}, "truncation"),
    "turns": ({"audio": {"input": {"turn_detection": {"threshold": 2}}}}, "audio.input.turn_detection.threshold"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_part_is_rejected_with_its_name_and_the_others_take_effect(name: str) -> None:
    changes, param = WRONG[name]
    async with raw(spoken("Yes.")) as (orchestrator, talker):
        await talker.until("session.created")
        await talker.send("session.update", event_id="mine", session={**changes, "instructions": "x", "seed": None})
        updated = await talker.until("session.updated")
        error = await talker.error()
        assert (error["param"], error["event_id"]) == (f"session.{param}", "mine")
        created = talker.received[0]["session"]
        assert updated["session"] == {**created, "instructions": "x"}
        await talker.say("Hello")
        await talker.send("response.create", response={key: changes[key] for key in changes})
        assert (await talker.error())["param"] == f"response.{param}"
        await talker.respond()
        assert messages(orchestrator) == [("system", "x"), ("user", "Hello")]


async def test_a_strict_gateway_rejects_what_it_would_ignore() -> None:
    async with served() as orchestrator, conversing(orchestrator, strict=True) as url, connected(url) as talker:
        for part in ({"tracing": "auto"}, {"temperature": 1}):
            session = {"type": "realtime", "truncation": "disabled", "instructions": "x", **part}
            await talker.send("session.update", session=session)
            updated = await talker.until("session.updated")
            assert (updated["session"]["instructions"], "warnings" in updated) == ("x", False)
            assert (await talker.error())["param"] == f"session.{next(iter(part))}"


ALIASES = Aliases(voices={"nova": "Ethan"})


@pytest.mark.parametrize("voice", ["Ethan", {"id": "Ethan"}, "nova"], ids=["name", "object", "alias"])
async def test_null_is_the_default_and_voices_of_the_model_remain(voice: Any) -> None:
    voices = Signature(options=[OptionSpec(name="speaker", allowed_texts=["Ethan"])])
    async with served() as orchestrator, conversing(orchestrator, spoken("Yes."), aliases=ALIASES) as url:
        describe(orchestrator, "text", "audio", signature=voices)
        async with connected(url) as talker:
            await talker.update(audio={"output": {"voice": voice}}, instructions="x", tool_choice="none")
            await talker.say("Hello")
            await talker.respond()
            assert orchestrator.requests[0].parameters.options["speaker"].text == "Ethan"
            await talker.update(audio=None, instructions=None, tool_choice=None, output_modalities=None)
            created, updated = talker.received[0]["session"], talker.received[-1]["session"]
            assert updated == created


BETA_HEADER = {"additional_headers": {"OpenAI-Beta": "realtime=v1"}}
BETA_PROTOCOL = {"subprotocols": ["realtime", "openai-beta.realtime-v1"]}


@pytest.mark.parametrize("options", [BETA_HEADER, BETA_PROTOCOL, {}], ids=["header", "protocol", "shape"])
async def test_a_client_of_the_beta_has_its_names(options: Any) -> None:
    samples = np.arange(RATE_HZ, dtype=np.int16)
    async with raw(spoken("Good ", "morning."), **options) as (orchestrator, talker):
        created = await talker.until("session.created")
        assert ("modalities" in created["session"]) == bool(options)
        flat = {"modalities": ["text", "audio"], "input_audio_format": "g711_ulaw", "output_audio_format": "g711_alaw"}
        await talker.send("session.update", session={**flat, "turn_detection": None, "voice": "alloy"})
        session = (await talker.until("session.updated"))["session"]
        assert {name: session[name] for name in flat} == {**flat, "modalities": ["audio"]}
        await talker.send(
            "conversation.item.create",
            item={"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hm."}]},
        )
        item = (await talker.until("conversation.item.created"))["item"]
        assert item["content"] == [{"type": "text", "text": "Hm."}]
        law = G711("audio/pcmu", "encode").encode(samples.tobytes())
        await talker.send("input_audio_buffer.append", audio=base64.b64encode(law).decode())
        await talker.send("input_audio_buffer.commit")
        content = [{"type": "input_audio", "audio": base64.b64encode(law).decode()}]
        await talker.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await talker.send("response.create", response={"modalities": ["audio", "text"]})
        response = (await talker.until("response.done"))["response"]
        for message in orchestrator.requests[0].input.conversation.messages[1:]:
            heard = wav_samples(message.parts[0])
            assert len(heard) == pytest.approx(len(samples), abs=200)
            assert np.corrcoef(heard[500:20_000], samples[500:20_000])[0, 1] > 0.99
        assert talker.texts("response.audio_transcript.delta") == "Good morning."
        audio = talker.audio("response.audio.delta")
        assert len(audio) == pytest.approx(2 * 800, abs=20)
        assert len(set(audio[100:1_000])) <= 3
        assert response["modalities"] == ["audio"]
        assert response["output"][0]["content"] == [{"type": "audio", "transcript": "Good morning."}]
        assert not [
            each["type"] for each in talker.received if "output_" in each["type"] and "output_item" not in each["type"]
        ]
