"""Realtime conversations of OpenAI's official client with a gateway, whose orchestrator follows scripts."""

import asyncio
import base64
import json
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import websockets
from google.protobuf.message import Message

from stagemesh.client import clients
from stagemesh.common.errors import InternalError
from stagemesh.v1 import request_pb2
from stagemesh.v1.signature_pb2 import Signature
from tests.client import scripted_sessions
from tests.client.scripted import Pause, Script, Talk, admitted, served, text
from tests.gateway.attacks import post
from tests.gateway.making import describe, rejection, serving
from tests.gateway.talking import (
    CALL,
    RATE_HZ,
    TOOL,
    connected,
    conversing,
    messages,
    pcm,
    said,
    spoken,
    talking,
    wav_samples,
    written,
)


async def test_a_spoken_response_has_the_events_of_openai() -> None:
    async with talking(spoken("Good ", "morning.")) as (orchestrator, talker):
        session = talker.received[0]["session"]
        assert session["output_modalities"] == ["audio"]
        assert session["audio"]["input"]["turn_detection"] is None
        await talker.say("Hello")
        first = len(talker.received)
        response = await talker.respond(instructions="Be polite.")
        assert messages(orchestrator) == [("system", "Be polite."), ("user", "Hello")]
        assert list(orchestrator.requests[0].outputs) == ["text", "audio"]
        assert [event["type"] for event in talker.received[first:] if "delta" not in event["type"]] == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        assert talker.texts("response.output_audio_transcript.delta") == "Good morning."
        samples = np.frombuffer(talker.audio("response.output_audio.delta"), np.int16)
        assert len(samples) == RATE_HZ // 5
        assert samples[100] == pytest.approx(0.25 * 32_768, abs=2)
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["transcript"] == "Good morning."


async def test_a_response_in_text_follows_the_conversation() -> None:
    async with talking(written("One.")) as (orchestrator, talker):
        await talker.update(output_modalities=["text"])
        await talker.say("First")
        await talker.respond()
        await talker.say("Second")
        response = await talker.respond(max_output_tokens=5)
        assert messages(orchestrator) == [("user", "First"), ("assistant", "One."), ("user", "Second")]
        assert list(orchestrator.requests[1].outputs) == ["text"]
        assert orchestrator.requests[1].parameters.sampling.max_tokens == 5
        assert talker.texts("response.output_text.delta") == "One.One."
        assert response["output"][0]["content"] == [{"type": "output_text", "text": "One."}]


async def test_a_tool_is_called() -> None:
    async with talking(spoken(*CALL), spoken("Noon.")) as (orchestrator, talker):
        await talker.update(tools=[TOOL])
        await talker.say("What time is it?")
        response = await talker.respond()
        assert orchestrator.requests[0].input.conversation.tools[0].name == "read_clock"
        call = response["output"][0]
        assert (call["type"], call["name"]) == ("function_call", "read_clock")
        assert json.loads(call["arguments"]) == {"zone": "Asia/Tokyo"}
        # Nothing is said, because the audio is that of the call.
        assert "response.output_audio.delta" not in {event["type"] for event in talker.received}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
        await talker.send("conversation.item.create", item=output)
        await talker.until("conversation.item.done")
        await talker.respond()
        prompt = orchestrator.requests[1].input.conversation.messages
        assert [(each.name, each.id) for each in prompt[1].tool_calls] == [("read_clock", call["call_id"])]
        assert (prompt[2].role, prompt[2].content) == (request_pb2.ROLE_TOOL, "12:00")
        assert prompt[2].tool_call_id == call["call_id"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "read_clock"}], ids=["any", "named"])
async def test_a_forced_call_needs_its_tool_and_is_the_whole_response(choice: object) -> None:
    async with talking(spoken(*CALL)) as (orchestrator, talker):
        await talker.say("What time is it?")
        await talker.send("response.create", response={"tool_choice": choice})
        assert (await talker.error())["param"] == f"session.{'tools' if choice == 'required' else 'tool_choice'}"
        await talker.update(tools=[TOOL], parallel_tool_calls=False)
        (made,) = (await talker.respond(tool_choice=choice))["output"]
        assert (made["type"], made["name"]) == ("function_call", "read_clock")
        assert json.loads(made["arguments"]) == {"zone": "Asia/Tokyo"}
        name = "" if choice == "required" else "read_clock"
        sent = orchestrator.requests[0].input.conversation.tool_choice
        assert sent == request_pb2.ToolChoice(required=True, name=name, single=True)


async def test_a_response_prefers_the_replicas_of_the_one_before() -> None:
    async with talking(spoken("One."), spoken("Two.")) as (orchestrator, talker):
        for _ in range(2):
            await talker.say("Count")
            await talker.respond()
        replicas = orchestrator.requests[1].preferred_replicas
        assert not orchestrator.requests[0].preferred_replicas
        assert dict(replicas) == dict(admitted().admitted.choices[0].replicas)
        assert replicas


async def test_a_cancelled_response_is_truncated_to_its_heard_part() -> None:
    script: Script = [admitted(), *said("one ", "two ", "three ", "four "), Pause.FOREVER]
    async with talking(script, spoken("Five.")) as (orchestrator, talker):
        await talker.say("Count")
        await talker.send("response.create")
        for _ in range(4):
            await talker.until("response.output_audio.delta")
        await talker.send("response.cancel")
        response = (await talker.until("response.done"))["response"]
        await orchestrator.hung_up.wait()
        assert response["status"] == "cancelled"
        assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        item = response["output"][0]
        assert item["status"] == "incomplete"
        await talker.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=5_000)
        assert "send at most that" in (await talker.error())["message"]
        await talker.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=200)
        await talker.until("conversation.item.truncated")
        await talker.say("Go on")
        await talker.respond()
        assert messages(orchestrator)[1] == ("assistant", "one two")


async def test_audio_becomes_a_message_when_it_is_committed() -> None:
    samples = np.arange(2 * RATE_HZ, dtype=np.int16)
    async with talking(spoken("Yes.")) as (orchestrator, talker):
        await talker.send("input_audio_buffer.append", audio=pcm(samples[:100]))
        await talker.send("input_audio_buffer.clear")
        await talker.until("input_audio_buffer.cleared")
        await talker.send("input_audio_buffer.commit")
        assert "empty" in (await talker.error())["message"]
        for start in range(0, len(samples), RATE_HZ // 2):
            await talker.send("input_audio_buffer.append", audio=pcm(samples[start : start + RATE_HZ // 2]))
        await talker.send("input_audio_buffer.commit")
        committed = await talker.until("input_audio_buffer.committed")
        await talker.until("conversation.item.done")
        await talker.respond()
        part = orchestrator.requests[0].input.conversation.messages[0].parts[0]
        np.testing.assert_array_equal(wav_samples(part), samples)
        await talker.send("conversation.item.retrieve", item_id=committed["item_id"])
        item = (await talker.until("conversation.item.retrieved"))["item"]
        assert base64.b64decode(item["content"][0]["audio"]) == samples.tobytes()


async def test_large_media_are_converted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, loop, sizes = pcm(np.arange(1 << 21, dtype=np.int16)), threading.current_thread(), [0]
    speech = json.dumps({"model": "p", "input": "x", "ref_audio": f"data:audio/wav;base64,{sound}"}).encode()
    image = [{"type": "input_image", "image_url": f"data:image/png;base64,{sound}"}]
    half = [{"type": "input_image", "image_url": f"data:image/png;base64,{sound[: (1 << 18) - 4]}AA=={sound}"}]

    def observe(module: Any, name: str) -> None:
        function = getattr(module, name)

        def observed(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            size = result.ByteSize() if isinstance(result, Message) else len(result)
            sizes.append(size if threading.current_thread() is loop else 0)
            return result

        monkeypatch.setattr(module, name, observed)

    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text", "audio", signature=Signature(media=True))
        orchestrator.scripts.append(spoken("Yes."))
        async with connected(address) as talker:
            for module, name in ((base64, "b64encode"), (base64, "b64decode"), (msgspec.json, "encode")):
                observe(module, name)
            assert (await post(address, "audio/speech", speech)).status_code == 200
            await talker.send("input_audio_buffer.append", audio=sound)
            await talker.send("input_audio_buffer.commit")
            item = (await talker.until("conversation.item.done"))["item"]
            observe(clients, "build_request")
            assert (await talker.respond())["status"] == "completed"
            await talker.send("conversation.item.retrieve", item_id=item["id"])
            item = (await talker.until("conversation.item.retrieved"))["item"]
            assert item["content"][0]["audio"] == sound
            await talker.send("conversation.item.create", item={"type": "message", "role": "user", "content": image})
            assert (await talker.until("conversation.item.done"))["item"]["content"] == image
            await talker.send("conversation.item.create", item={"type": "message", "role": "user", "content": half})
            assert "padding" in (await talker.error())["message"]
    assert sum(sizes) < 1 << 18


async def test_detected_speech_is_answered_and_interrupts() -> None:
    second = np.ones(RATE_HZ, np.int16)
    talk: Talk = [
        scripted_sessions.opened(limit=64 << 20),
        *["append"] * 2,
        *scripted_sessions.detected(1, 0.5, 1.5),
        "append",
        *scripted_sessions.detected(2, 2.0, 3.0),
        Pause.FOREVER,
    ]
    answer: Script = [admitted(), *said("Well, "), Pause.FOREVER]
    async with talking(answer, spoken("Yes."), talks=[talk]) as (orchestrator, talker):
        assert talker.received[0]["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        for value in (1, 2):
            await talker.send("input_audio_buffer.append", audio=pcm(second * value))
        started = await talker.until("input_audio_buffer.speech_started")
        stopped = await talker.until("input_audio_buffer.speech_stopped")
        assert (started["audio_start_ms"], stopped["audio_end_ms"]) == (500, 1500)
        committed = await talker.until("input_audio_buffer.committed")
        assert committed["item_id"] == started["item_id"] == stopped["item_id"]
        await talker.until("response.output_audio.delta")
        await talker.send("input_audio_buffer.append", audio=pcm(second * 3))
        interrupted = (await talker.until("response.done"))["response"]
        assert interrupted["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert (await talker.until("response.done"))["response"]["status"] == "completed"
        opening = orchestrator.events[0][0].open
        assert opening.turn_detection.detects_only
        first, second_request = (each.input.conversation.messages for each in orchestrator.requests)
        half = RATE_HZ // 2
        np.testing.assert_array_equal(wav_samples(first[0].parts[0]), np.repeat([1, 2], half))
        np.testing.assert_array_equal(wav_samples(second_request[2].parts[0]), np.repeat([3], RATE_HZ))
        assert second_request[1].content == "Well, "


async def test_a_listener_that_fails_is_reported_and_replaced() -> None:
    failing: Talk = [scripted_sessions.opened(), "append", InternalError("the stage is lost")]
    silent: Talk = [scripted_sessions.opened(), "append", Pause.FOREVER]
    async with talking(talks=[failing, silent]) as (orchestrator, talker):
        second = pcm(np.zeros(RATE_HZ, np.int16))
        await talker.send("input_audio_buffer.append", audio=second)
        assert "the stage is lost" in (await talker.error())["message"]
        await talker.send("input_audio_buffer.append", audio=second)
        await talker.send("input_audio_buffer.clear")
        await talker.until("input_audio_buffer.cleared")
        assert len(orchestrator.events) == 2


async def test_items_can_be_inserted_and_deleted() -> None:
    async with talking(spoken("Ok.")) as (orchestrator, talker):
        await talker.say("second", id="b")
        content = [{"type": "input_text", "text": "first"}]
        item = {"type": "message", "role": "system", "content": content, "id": "a"}
        await talker.send("conversation.item.create", item=item, previous_item_id="root")
        assert (await talker.until("conversation.item.added"))["previous_item_id"] is None
        await talker.say("third", id="c")
        await talker.send("conversation.item.delete", item_id="b")
        await talker.until("conversation.item.deleted")
        await talker.respond()
        assert messages(orchestrator) == [("system", "first"), ("user", "third")]
        wrong: list[tuple[str, dict[str, Any], str]] = [
            ("create", {"item": {**item, "id": "c"}}, "item.id"),
            ("create", {"item": {**item, "id": "d"}, "previous_item_id": "x"}, "previous_item_id"),
            ("delete", {"item_id": "b"}, "item_id"),
            ("truncate", {"item_id": "c", "content_index": 0, "audio_end_ms": 0}, "item_id"),
        ]
        for kind, fields, param in wrong:
            await talker.send(f"conversation.item.{kind}", **fields)
            assert (await talker.error())["param"] == param


async def test_a_response_outside_the_conversation_leaves_no_item() -> None:
    async with talking(written("Topic: sea"), spoken("Hello.")) as (orchestrator, talker):
        known = await talker.say("Tell me of the sea")
        request = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Classify."}]}]
        response = await talker.respond(
            conversation="none",
            output_modalities=["text"],
            input=[{"type": "item_reference", "id": known["id"]}, *request],
            metadata={"purpose": "topic"},
        )
        assert messages(orchestrator) == [("user", "Tell me of the sea"), ("user", "Classify.")]
        assert (response["conversation_id"], response["metadata"]) == (None, {"purpose": "topic"})
        await talker.respond()
        assert messages(orchestrator) == [("user", "Tell me of the sea")]


async def test_one_response_of_the_conversation_runs_at_a_time() -> None:
    async with talking([admitted(), text("so"), Pause.FOREVER]) as (_, talker):
        await talker.send("response.cancel")
        assert (await talker.error())["code"] == "response_cancel_not_active"
        await talker.send("response.create")
        assert "empty" in (await talker.error())["message"]
        await talker.say("Hello")
        await talker.send("response.create")
        await talker.until("response.output_audio_transcript.delta")
        await talker.send("response.create", event_id="mine")
        error = await talker.error()
        assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "mine")


async def test_four_responses_of_a_connection_run_at_a_time() -> None:
    async with talking([admitted(), text("so"), Pause.FOREVER]) as (orchestrator, talker):
        await talker.say("Hello")
        await talker.send("response.create")
        for _ in range(3):
            await talker.send("response.create", response={"conversation": "none"})
        for _ in range(4):
            created = await talker.until("response.created")
        await talker.send("response.create", response={"conversation": "none"}, event_id="fifth")
        error = await talker.error()
        assert (error["code"], error["event_id"]) == ("rate_limit_exceeded", "fifth")
        await talker.send("response.cancel", response_id=created["response"]["id"])
        await talker.until("response.done")
        await talker.send("response.create", response={"conversation": "none"})
        await talker.until("response.created")
        while len(orchestrator.requests) < 5:
            await talker.until("response.output_audio_transcript.delta")


async def test_a_failed_response_is_reported() -> None:
    async with talking([admitted(), text("so"), InternalError("the stage is lost")]) as (_, talker):
        await talker.say("Hello")
        response = await talker.respond()
        assert response["status"] == "failed"
        assert "the stage is lost" in response["status_details"]["error"]["message"]
        assert response["output"][0]["status"] == "incomplete"


async def test_frames_that_are_not_events_are_rejected() -> None:
    frames: Mapping[str, tuple[str | bytes, str]] = {
        "binary": (b"{}", "text frame"),
        "json": ("{", "not a JSON object"),
        "list": ("[]", "not a JSON object"),
        "kind": ('{"type": "session.destroy"}', "session.destroy"),
        "base64": ('{"type": "input_audio_buffer.append", "audio": "?"}', "not base64"),
        "half": ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "half a sample"),
        "missing": ('{"type": "conversation.item.delete"}', "item_id"),
    }
    async with (
        served() as orchestrator,
        conversing(orchestrator) as url,
        websockets.connect(f"ws://{url}/v1/realtime?model=p") as socket,
    ):
        await socket.recv()
        for frame, words in frames.values():
            await socket.send(frame)
            event = json.loads(await socket.recv())
            assert event["type"] == "error"
            assert words in event["error"]["message"]


async def test_a_client_that_leaves_cancels_its_response() -> None:
    async with served() as orchestrator, conversing(orchestrator, [admitted(), text("so"), Pause.FOREVER]) as url:
        async with connected(url) as talker:
            await talker.say("Hello")
            await talker.send("response.create")
            await talker.until("response.output_audio_transcript.delta")
            assert not orchestrator.hung_up.is_set()
        await asyncio.wait_for(orchestrator.hung_up.wait(), 10)


@pytest.mark.parametrize(
    ("path", "origin", "status"),
    [
        ("/v1/realtime", None, 400),
        ("/v1/realtime?model=other", None, 404),
        ("/v1/realtime?model=p", "http://elsewhere.example", 403),
    ],
)
async def test_a_connection_that_cannot_be_served_is_rejected(path: str, origin: str | None, status: int) -> None:
    async with served() as orchestrator, conversing(orchestrator) as url:
        response, message = await rejection(f"ws://{url}{path}", origin=origin)
        assert response.status_code == status
        assert message
