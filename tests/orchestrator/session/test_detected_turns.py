"""Turns whose ends a stage detects in the audio that the client appends."""

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InternalError, InvalidRequestError
from stagemesh.common.requests.request_checks import read_samples
from tests.orchestrator.session.fake_runner import Chat, SteeredRequest, chatting, settle
from tests.orchestrator.session.scripts import LISTEN

RATE_HZ = 16_000


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncGenerator[Chat]:
    """A session in which speech interrupts an answer."""
    async with chatting(tmp_path, LISTEN, turn_detection={"interrupts": True}) as chat:
        yield chat


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncGenerator[Chat]:
    """A session in which speech waits for the end of an answer. The first turn has been spoken."""
    async with chatting(tmp_path, LISTEN, turn_detection={"interrupts": False}) as chat:
        hear(chat, 1)
        await speak_and_pause(chat, 1, begin_s=0.0, end_s=1.0)
        yield chat


def hear(chat: Chat, *values: float) -> None:
    """Appends a second of audio for each value, which all samples of the second have."""
    for value in values:
        chat.hear(np.full(RATE_HZ, value, np.float32))


def detect(listener: SteeredRequest, *, begins: bool, at_s: float) -> None:
    """Makes the stage report the begin or the end of speech in the audio that it received."""
    listener.emit_rows(np.array([[float(begins), at_s]]), name="@speech")


def heard(chat: Chat, turn: int) -> list[float]:
    """Returns the first sample of each second in the prompt of a turn."""
    messages = chat.request(turn).message.input.conversation.messages
    return [float(value) for value in read_samples(messages[-1].parts[0].audio)[::RATE_HZ]]


async def speak_and_pause(chat: Chat, turn: int, *, begin_s: float, end_s: float, listener: str = ".listen") -> None:
    """Makes a listener of a turn report speech."""
    detect(chat.request(turn, listener), begins=True, at_s=begin_s)
    detect(chat.request(turn, listener), begins=False, at_s=end_s)
    await settle()


async def test_the_end_of_speech_commits_the_turn_with_the_audio_until_then(chat: Chat) -> None:
    hear(chat, *range(4))
    await speak_and_pause(chat, 1, begin_s=1.0, end_s=3.0)
    assert heard(chat, 1) == [1.0, 2.0]
    assert chat.kinds(1) == ["speech", "speech", "committed"]
    assert chat.last("committed").committed.audio_end_s == 3.0


async def test_later_audio_is_heard_again_for_the_next_turn(chat: Chat) -> None:
    hear(chat, *range(4))
    await speak_and_pause(chat, 1, begin_s=1.0, end_s=2.0)
    chat.request(1).end()
    hear(chat, 4)
    await speak_and_pause(chat, 2, begin_s=0.0, end_s=2.0)
    assert heard(chat, 2) == [2.0, 3.0]
    assert chat.last("committed").committed.audio_end_s == 4.0


async def test_a_session_that_only_detects_turns_answers_none(tmp_path: Path) -> None:
    async with chatting(tmp_path, LISTEN, turn_detection={"detects_only": True}) as chat:
        hear(chat, *range(4))
        await speak_and_pause(chat, 1, begin_s=1.0, end_s=2.0)
        await speak_and_pause(chat, 2, begin_s=0.0, end_s=1.0)
        chat.commit("typed")
        await settle()
        assert set(chat.runner.requests) == {"s.1.listen", "s.2.listen", "s.3.listen"}
        assert chat.session._turns._transcript.size_bytes == 0
    assert chat.kinds(1) == ["speech", "speech", "committed", "ended"]
    assert chat.kinds(2) == ["speech", "speech", "committed", "ended"]
    assert chat.kinds(3) == ["committed", "ended"]
    assert not chat.last("ended").ended.HasField("error")


async def test_speech_interrupts_the_answer_to_the_former_turn(chat: Chat) -> None:
    hear(chat, 1)
    await speak_and_pause(chat, 1, begin_s=0.0, end_s=1.0)
    chat.request(1).emit("answer")
    hear(chat, 2)
    detect(chat.request(2, ".listen"), begins=True, at_s=0.5)
    await settle()
    assert chat.request(1).ended.done()
    assert chat.kinds(1) == ["speech", "speech", "committed", "interrupted", "ended"]
    assert chat.last("interrupted").interrupted.detected


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_turn_that_ends_during_an_answer_waits_for_it(patient: Chat, resumes: bool) -> None:
    hear(patient, 2, 3)
    await speak_and_pause(patient, 2, begin_s=0.0, end_s=1.0)
    if resumes:
        await speak_and_pause(patient, 2, begin_s=1.5, end_s=2.0)
    assert "s.2" not in patient.runner.requests
    await patient.answer(1)
    assert heard(patient, 2) == ([2.0, 3.0] if resumes else [2.0])


async def test_long_silence_is_forgotten(chat: Chat) -> None:
    hear(chat, *range(30))
    await speak_and_pause(chat, 1, begin_s=28.0, end_s=30.0)
    assert chat.session._turns.input.prompt.size_bytes == 0
    assert heard(chat, 1) == [28.0, 29.0]


async def test_a_failed_listener_ends_the_turn_with_its_error(chat: Chat) -> None:
    hear(chat, 1)
    chat.request(1, ".listen").end(InvalidRequestError("too fast", reason="INVALID_MEDIA"))
    await settle()
    hear(chat, 2)
    await speak_and_pause(chat, 2, begin_s=0.0, end_s=1.0)
    assert heard(chat, 2) == [2.0]
    assert chat.kinds(1) == ["committed", "ended"]
    assert next(each for each in chat.received if each.HasField("ended")).ended.error.reason == "INVALID_MEDIA"


async def test_a_listener_that_fails_during_an_answer_waits_for_it(patient: Chat) -> None:
    hear(patient, 2)
    patient.request(2, ".listen").end(InternalError("broken"))
    await settle()
    assert patient.kinds(2) == []
    await patient.answer(1)
    assert patient.kinds(2) == ["committed", "ended"]


async def test_a_client_that_returns_is_heard_from_the_begin_of_the_turn(chat: Chat) -> None:
    hear(chat, 1)
    detect(chat.request(1, ".listen"), begins=True, at_s=0.0)
    await settle()
    await chat.leave()
    assert chat.request(1, ".listen").ended.done()
    chat.attach(is_known=True, linger_s=60)
    hear(chat, 2)
    assert [packet.tensors["audio"][0] for packet in chat.request(1, ".listen.2").packets] == [1.0, 2.0]
    await speak_and_pause(chat, 1, begin_s=0.0, end_s=2.0, listener=".listen.2")
    assert heard(chat, 1) == [1.0, 2.0]


async def test_the_client_may_commit_before_the_end_is_detected(chat: Chat) -> None:
    hear(chat, 1)
    chat.commit()
    await settle()
    assert heard(chat, 1) == [1.0]
    assert chat.request(1, ".listen").ended.done()
    assert not chat.last("committed").committed.detected
