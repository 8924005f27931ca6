"""Events that a session cannot accept: each has an error of the catalogue, and the session continues if it can."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, OverloadedError, StagemeshError, UnsupportedError
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.orchestrator.session.turn_input import PROMPT_WINDOW_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.later_contract import later_class, today
from tests.orchestrator.mesh import Mesh, mesh
from tests.orchestrator.session.fake_runner import Chat, chatting, settle
from tests.orchestrator.session.scripts import ECHO, LISTEN, SPEAK, STREAM
from tests.orchestrator.session.talk import Request, Talk, talking
from tests.rpc.call_errors import raises

SMALL, SMALL_SPEAK = (file + "limits: {max_session_bytes: 65536}\n" for file in (ECHO, SPEAK))


@pytest.mark.parametrize("events", [["too early"], []])
async def test_the_first_event_must_open_the_session(echo: Mesh, events: list[str]) -> None:
    talk = Talk(echo.stub)
    for text in events:
        await talk.say(text)
    if not events:
        await talk.call.done_writing()
    assert (await talk.failure()).reason == "SESSION_NOT_OPEN"


async def test_a_session_is_opened_once_in_a_call(echo: Mesh) -> None:
    async with talking(echo.stub) as talk:
        await talk.send(seq=0, open={})
        assert (await talk.rejection()).error.reason == "SESSION_NOT_OPEN"
        talk.seq = 0
        assert await talk.turn("one") == "a done"


async def test_events_after_the_close_are_rejected(chat: Chat) -> None:
    chat.send(close={})
    chat.say("too late")
    assert await chat.rejection() == "SESSION_CLOSED"
    assert (chat.has_ended, chat.session.is_closed) == (True, True)


async def test_a_closed_session_is_forgotten(echo: Mesh) -> None:
    async with talking(echo.stub, session_id="s", linger_s=60) as talk:
        await talk.close()
        await talk.rest()
    async with talking(echo.stub, session_id="s", linger_s=60) as again:
        assert not again.received[0].opened.is_known


async def test_a_second_commit_is_rejected_and_keeps_its_input(chat: Chat) -> None:
    chat.commit("one")
    chat.commit("two")
    assert await chat.rejection() == "TURN_RUNNING"
    await chat.answer(1)
    assert chat.kinds(1) == ["committed", "ended"]
    chat.commit()
    assert chat.prompt(2) == ["one", "", "two"]


async def test_blank_input_cannot_be_committed(chat: Chat) -> None:
    chat.commit(" ")
    assert await chat.rejection() == "EMPTY_PROMPT"
    chat.commit("one")
    assert chat.prompt(1) == [" one"]


@pytest.mark.parametrize(("turn", "reason"), [(0, "TURN_ENDED"), (1, "TURN_ENDED"), (2, "TURN_NOT_STARTED")])
async def test_only_a_turn_that_is_being_answered_can_be_interrupted(chat: Chat, turn: int, reason: str) -> None:
    await chat.turn(1, "hello", "answer")
    chat.send(interrupt={"turn": turn})
    assert await chat.rejection() == reason


@pytest.mark.parametrize(
    ("truncation", "reason"),
    [
        ({"turn": 2, "positions": [{"name": "text", "position": 7}]}, "BEYOND_OUTPUT"),
        ({"turn": 2, "positions": [{"name": "other", "position": 1}]}, "BEYOND_OUTPUT"),
        ({"turn": 2}, "INVALID_REQUEST"),
        ({"turn": 1, "positions": [{"name": "text"}]}, "TURN_ENDED"),
        ({"turn": 3, "positions": [{"name": "text"}]}, "TURN_NOT_STARTED"),
    ],
)
async def test_a_truncation_must_fit_the_last_answer(chat: Chat, truncation: Mapping[str, Any], reason: str) -> None:
    await chat.turn(1, "hello", "one")
    await chat.turn(2, "hello", "answer")
    chat.send(truncate=truncation)
    assert await chat.rejection() == reason
    chat.commit("three")
    assert chat.prompt(3) == ["hello", "one", "hello", "answer", "three"]


async def test_a_running_turn_cannot_be_truncated(chat: Chat) -> None:
    chat.commit("one")
    chat.send(truncate={"turn": 1, "positions": [{"name": "text"}]})
    assert await chat.rejection() == "TURN_RUNNING"


async def test_a_piece_of_the_largest_message_has_credit(chat: Chat) -> None:
    for _ in range(3):
        chat.say("x" * (PROMPT_WINDOW_BYTES // 2 - 512 * 1024))
        chat.send(clear={})
    await settle()
    assert not any(each.HasField("rejected") for each in chat.received)


async def test_a_turn_beyond_the_limit_is_rejected(tmp_path: Path) -> None:
    async with chatting(tmp_path, SMALL) as chat:
        chat.say("x" * 60_000)
        chat.say("x" * 10_000)
        assert await chat.rejection() == "SESSION_TOO_LARGE"
        chat.send(clear={})
        await chat.turn(1, "hello", "x" * 60_000)
        chat.received.clear()
        # The transcript counts, too.
        chat.say("x" * 10_000)
        assert await chat.rejection() == "SESSION_TOO_LARGE"


@pytest.mark.parametrize("mode", ["prompt", "stream"])
async def test_small_pieces_count_for_their_memory(tmp_path: Path, mode: str) -> None:
    file, fields = (SMALL, dict[str, Any]()) if mode == "prompt" else (SMALL_SPEAK, {"input_mode": STREAM})
    async with chatting(tmp_path, file, **fields) as chat:
        for _ in range(65536 // 256):
            chat.say("a")
        assert not any(each.HasField("rejected") for each in chat.received)
        chat.say("a")
        assert await chat.rejection() == "SESSION_TOO_LARGE"


async def test_a_transcript_of_many_messages_is_rejected_before_it_is_parsed(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        for _ in range(5):
            chat.send(append={"message": {"role": request_pb2.ROLE_USER, "parts": [{"text": ""}] * 1000}})
        chat.commit()
        assert await chat.rejection() == "MESSAGE_TOO_LARGE"


async def test_an_opening_conversation_beyond_the_limit_ends_the_call(tmp_path: Path) -> None:
    message = request_pb2.Message(role=request_pb2.ROLE_SYSTEM, content="x" * 70_000)
    with raises(OverloadedError, reason="SESSION_TOO_LARGE"):
        async with chatting(tmp_path, SMALL, conversation={"messages": [message]}):
            pass


@pytest.mark.parametrize("limits", ["max_sessions: 3", "per_caller: {max_sessions: 2}"])
async def test_more_sessions_than_allowed_are_rejected(tmp_path: Path, limits: str) -> None:
    limited = f"{ECHO}limits: {{{limits}}}\n"
    async with (
        mesh(tmp_path, limited) as echo,
        talking(echo.stub, caller="other"),
        talking(echo.stub),
        talking(echo.stub) as last,
    ):
        next_one = Talk(echo.stub)
        await next_one.send(seq=0, open={})
        error = await next_one.failure()
        await last.close()
        await last.rest()
        async with talking(echo.stub):
            pass
    assert (error.reason, error.retry_after_s) == ("SESSION_LIMIT", 1.0)


async def test_a_gap_in_the_numbers_of_events_ends_the_call(echo: Mesh) -> None:
    async with talking(echo.stub, session_id="s", linger_s=60) as talk:
        await talk.say("one")
        await talk.send(seq=3, commit=orchestrator_pb2.TurnCommit())
        error = await talk.failure()
        async with talking(echo.stub, session_id="s", linger_s=60, earlier_calls=1) as again:
            assert again.received[0].opened.accepted_seq == 1
    assert error.reason == "EVENT_GAP"


@pytest.mark.parametrize("seq", [0, 2])
async def test_the_first_event_of_a_new_session_has_the_number_one(chat: Chat, seq: int) -> None:
    with raises(InvalidRequestError, reason="EVENT_GAP"):
        chat.send(seq=seq, commit={})


async def test_an_event_of_an_unknown_kind_is_rejected(chat: Chat) -> None:
    assert chat.call is not None
    chat.session.handle(chat.call, today(later_class("ConverseRequest")(seq=1, later="news"), Request))
    assert await chat.rejection() == "UNKNOWN_KIND"
    chat.send(seq=2)
    assert await chat.rejection() == "INVALID_REQUEST"


async def test_a_piece_of_an_unknown_kind_is_rejected(chat: Chat) -> None:
    chat.send(append=today(later_class("InputAppend")(later="news"), orchestrator_pb2.InputAppend))
    assert await chat.rejection() == "UNKNOWN_KIND"
    chat.send(append={})
    assert await chat.rejection() == "INVALID_PROMPT"


def _audio(*, count: int = 160, declared: int | None = None, rate_hz: int = 16_000) -> Mapping[str, Any]:
    """Returns an event that appends `count` samples. Their tensor declares another number of samples if it is given."""
    samples = inline_tensor("", np.zeros(count, np.float32))
    samples.shape[0] = count if declared is None else declared
    return {"append": {"part": {"audio": {"samples": samples, "sample_rate_hz": rate_hz}}}}


def _media(kind: str, media_type: str) -> Mapping[str, Any]:
    """Returns an event that appends a file."""
    return {"append": {"part": {kind: {"media_type": media_type, "data": b"content"}}}}


FIRST_EVENTS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], str]] = {
    "interruption before the first turn": (ECHO, {}, {"interrupt": {}}, "TURN_NOT_STARTED"),
    "image that no stage accepts": (ECHO, {}, _media("image", "image/png"), "UNSUPPORTED"),
    "audio that no stage accepts": (ECHO, {}, _audio(), "UNSUPPORTED"),
    "codec that cannot be streamed": (SPEAK, {"input_mode": STREAM}, _media("audio_file", "audio/opus"), "UNSUPPORTED"),
    "no sample rate": (LISTEN, {"turn_detection": {}}, _audio(rate_hz=0), "INVALID_MEDIA"),
    "sample rate that no stage takes": (LISTEN, {"turn_detection": {}}, _audio(rate_hz=1_000_000), "INVALID_MEDIA"),
    "shape that does not match": (LISTEN, {}, _audio(count=10, declared=20), "INVALID_CHUNK"),
}


@pytest.mark.parametrize("name", FIRST_EVENTS)
async def test_an_invalid_first_event_is_rejected(tmp_path: Path, name: str) -> None:
    text, settings, event, reason = FIRST_EVENTS[name]
    async with chatting(tmp_path, text, **settings) as chat:
        chat.send(**event)
        assert await chat.rejection() == reason


async def test_turns_are_restored_in_order(chat: Chat) -> None:
    chat.send(seq=0, restore={"turn": 2})
    assert await chat.rejection() == "INVALID_RESTORE"
    chat.say("one")
    chat.send(seq=0, restore={"turn": 1})
    assert await chat.rejection() == "SESSION_NOT_OPEN"


async def test_turns_cannot_be_restored_to_a_known_session(chat: Chat) -> None:
    await chat.turn(1, "hello", "answer")
    await chat.reattach()
    chat.send(seq=0, restore={"turn": 1})
    assert await chat.rejection() == "INVALID_RESTORE"


INSTRUCTED = {"conversation": {"messages": [{"role": "ROLE_SYSTEM", "content": "x"}]}}
ONLY_DETECTED = {"turn_detection": {"detects_only": True}}
LOUD_DETECTED = {"turn_detection": {"options": {"loudness": {"number": 1}}}}
OPENINGS: Mapping[str, tuple[str, Mapping[str, Any], type[StagemeshError], str]] = {
    "id": (ECHO, {"session_id": "a b"}, InvalidRequestError, "INVALID_ID"),
    "long id": (ECHO, {"session_id": "x" * 97}, InvalidRequestError, "INVALID_ID"),
    "pipeline": (ECHO, {"pipeline": "other"}, StagemeshError, "UNKNOWN_PIPELINE"),
    "caller": (ECHO, {"caller": "a b"}, InvalidRequestError, "INVALID_CALLER"),
    "output": (ECHO, {"outputs": ["audio"]}, InvalidRequestError, "UNKNOWN_OUTPUT"),
    "speech": (LISTEN, {"outputs": ["@speech"]}, InvalidRequestError, "UNKNOWN_OUTPUT"),
    "position": (ECHO, {"next_positions": [{"name": "audio"}]}, InvalidRequestError, "UNKNOWN_OUTPUT"),
    "choices": (ECHO, {"parameters": {"choices": 2}}, InvalidRequestError, "INVALID_CHOICES"),
    "sampling": (ECHO, {"parameters": {"sampling": {"top_p": 2}}}, InvalidRequestError, "INVALID_SAMPLING"),
    "timeout": (ECHO, {"turn_timeout_s": -1}, InvalidRequestError, "INVALID_REQUEST"),
    "conversation": (ECHO, {"conversation": {"messages": [{}]}}, InvalidRequestError, "INVALID_PROMPT"),
    "earlier calls": (ECHO, {"earlier_calls": 1_000_001}, InvalidRequestError, "INVALID_EARLIER_CALLS"),
    "mode": (ECHO, {"input_mode": 9}, UnsupportedError, "UNSUPPORTED"),
    "no input edge": (ECHO, {"input_mode": STREAM}, UnsupportedError, "UNSUPPORTED"),
    "streamed conversation": (SPEAK, {"input_mode": STREAM, **INSTRUCTED}, UnsupportedError, "UNSUPPORTED"),
    "streamed detection": (SPEAK, {"input_mode": STREAM, **ONLY_DETECTED}, UnsupportedError, "UNSUPPORTED"),
    "no detection": (ECHO, {"turn_detection": {}}, UnsupportedError, "UNSUPPORTED"),
    "detection option": (LISTEN, LOUD_DETECTED, InvalidRequestError, "UNKNOWN_OPTION"),
}


@pytest.mark.parametrize("name", OPENINGS)
async def test_a_session_with_invalid_settings_is_rejected(tmp_path: Path, name: str) -> None:
    text, fields, kind, reason = OPENINGS[name]
    with raises(kind, reason=reason):
        async with chatting(tmp_path, text, **fields):
            pass
