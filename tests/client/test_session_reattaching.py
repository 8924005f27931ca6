"""Tests that a session survives the loss of its connection or orchestrator, with each event sent and received once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from stagemesh.client import (
    AsyncClient,
    AsyncSession,
    AudioSamples,
    RetryPolicy,
    SessionEvent,
    SpeechDetected,
    Text,
    TurnCommitted,
    TurnEnded,
    TurnInterrupted,
)
from stagemesh.common.errors import NotReadyError, OverloadedError, StagemeshError, UnavailableError
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse
from stagemesh.v1.request_pb2 import ROLE_ASSISTANT, ROLE_USER
from tests.client.scripted import Pause, ScriptedOrchestrator, Talk, admitted, audio
from tests.client.scripted_sessions import (
    committed,
    generated,
    granted,
    interrupted,
    kinds,
    numbered,
    opened,
    positions,
    rejected,
    speech,
    text,
    texts,
    truncated,
    turn_ended,
)

QUICK = RetryPolicy(attempts=3, first_pause_s=0.01, max_pause_s=0.1, reattach_s=5)
PARKED = UnavailableError("idle", reason="SESSION_PARKED")
FIRST_TURN: Talk = ["commit", committed(1), text(1, "Hi"), turn_ended(1, "Hi")]


@asynccontextmanager
async def _session(*orchestrators: ScriptedOrchestrator, **arguments: Any) -> AsyncGenerator[AsyncSession]:
    endpoints = [each.endpoint for each in orchestrators]
    async with AsyncClient(*endpoints, retry_policy=QUICK) as client, client.converse(**arguments) as session:
        yield session


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def _text_of(events: Sequence[SessionEvent]) -> str:
    return "".join(event.delta for event in events if isinstance(event, Text))


async def _say(session: AsyncSession, line: str) -> list[SessionEvent]:
    await session.append(line)
    await session.commit()
    return [event async for event in session.answer()]


def _restored(events: Sequence[ConverseRequest]) -> list[list[tuple[int, str]]]:
    turns = (event.restore.messages for event in events if event.HasField("restore"))
    return [[(message.role, message.content) for message in messages] for messages in turns]


LOSSES = [Pause.BREAK, UnavailableError("it stops", reason="NOT_RUNNING", retry_after_s=0.01)]


@pytest.mark.parametrize("loss", LOSSES, ids=["broken connection", "orchestrator that stops"])
async def test_a_lost_answer_continues(orchestrator: ScriptedOrchestrator, loss: Pause | StagemeshError) -> None:
    first: Talk = [opened(), "commit", committed(1), generated(1, admitted(generation="g")), text(1, "Hi "), loss]
    rest: Talk = [committed(1), text(1, "you", position=3), turn_ended(1, "Hi you")]
    orchestrator.talks.extend([first, ["open", opened(known=True, accepted=2, turn=2), *rest, "close"]])
    async with _session(orchestrator) as session:
        events = await _say(session, "hello")
    assert _text_of(events) == "Hi you"
    assert [type(event) for event in events].count(TurnCommitted) == 1
    again = orchestrator.events[1]
    assert (again[0].open.turn, positions(again[0]), again[0].open.generation) == (1, {"text": 3}, "g")
    assert (again[0].open.earlier_calls, again[0].open.parameters.seed) == (1, 7)
    assert kinds(again) == ["open", "close"]


async def test_events_after_the_last_handled_one_are_sent_again(orchestrator: ScriptedOrchestrator) -> None:
    first: Talk = [opened(), "append", "append", Pause.BREAK]
    orchestrator.talks.extend([first, [opened(known=True, accepted=1), *FIRST_TURN, "close"]])
    async with _session(orchestrator) as session:
        await session.append("one")
        await session.append("two")
        await _say(session, "three")
    assert numbered(orchestrator.events[1]) == {2: "append", 3: "append", 4: "commit", 5: "close"}


@pytest.mark.parametrize("answer", [committed(1), rejected(2, NotReadyError("no", reason="TURN_RUNNING"))], ids=str)
async def test_a_lost_answer_to_a_commit_is_repeated(
    orchestrator: ScriptedOrchestrator, answer: ConverseResponse
) -> None:
    known: Talk = [opened(known=True, accepted=2, turn=2), answer, turn_ended(1), "close"]
    orchestrator.talks.extend([[opened(), "commit", Pause.BREAK], known])
    async with _session(orchestrator) as session:
        await session.append("hello")
        if answer == committed(1):
            assert await session.commit() == 1
        else:
            with pytest.raises(NotReadyError, match="no"):
                await session.commit()


async def test_repeated_responses_are_dropped(orchestrator: ScriptedOrchestrator) -> None:
    turn: Talk = [committed(1), text(1, "Hi"), interrupted(1, text=2), turn_ended(1, "Hi"), truncated(1, "H")]
    repeated: Talk = [opened(known=True, accepted=4, turn=2), *turn, "commit", committed(2), turn_ended(2), "close"]
    steps: Talk = [opened(), "commit", *turn[:2], "interrupt", *turn[2:4], "truncate", turn[4], "append", Pause.BREAK]
    orchestrator.talks.extend([steps, repeated])
    async with _session(orchestrator) as session:
        await session.append("hello")
        await session.commit()
        await session.interrupt()
        await session.truncate(positions={"text": 1})
        events = await _say(session, "again")
    counted = [type(event) for event in events]
    assert [counted.count(kind) for kind in (TurnCommitted, TurnInterrupted, TurnEnded)] == [2, 1, 2]


async def test_another_orchestrator_receives_the_transcript_and_the_kept_events(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN, "commit", committed(2), text(2, "Yo"), Pause.BREAK])
    rest: Talk = ["commit", committed(2), text(2, "Yo"), text(2, "!", position=2), turn_ended(2, "Yo!")]
    other.talks.append(["open", opened(), *rest, "close"])
    async with _session(orchestrator, other) as session:
        await _say(session, "hello")
        await session.append("how ", "are")
        events = await _say(session, " you")
    sent = other.events[0]
    assert kinds(sent) == ["open", "restore", "append", "append", "append", "commit", "close"]
    assert _restored(sent) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "Hi")]]
    assert (sent[0].open.turn, positions(sent[0])) == (2, {"text": 2})
    assert numbered(sent) == {3: "append", 4: "append", 5: "append", 6: "commit", 7: "close"}
    assert _text_of(events) == "Yo!"


async def test_the_transcript_has_what_was_heard(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    stop: Talk = ["interrupt", interrupted(1, text=2), turn_ended(1, "Hi"), "truncate", truncated(1, "H")]
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], *stop, "append", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with _session(orchestrator, other) as session:
        await session.append("hello")
        await session.commit()
        await session.interrupt()
        await session.truncate(positions={"text": 1})
        await _say(session, "again")
    assert _restored(other.events[0]) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "H")]]
    # An event that had its effect keeps its number and loses its content.
    assert numbered(other.events[0]) == {3: None, 4: None, 5: "append", 6: "commit", 7: "close"}


async def test_an_interruption_is_confirmed_although_the_orchestrator_is_lost(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], "interrupt", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with _session(orchestrator, other) as session:
        await session.append("hello")
        await session.commit()
        assert (await session.interrupt()).positions == {"text": 2}
        events = await _say(session, "again")
    assert _restored(other.events[0]) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "Hi")]]
    ended = [event for event in events if isinstance(event, TurnEnded)]
    assert ended == [TurnEnded(1, "Hi", None), TurnEnded(2, "", None)]


async def test_a_truncation_is_confirmed_although_the_orchestrator_is_lost(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    sound = generated(1, audio([0.0] * 100))
    answer: Talk = [text(1, "one two three four"), sound, turn_ended(1, "one two three four")]
    orchestrator.talks.append([opened(), "commit", committed(1), *answer, "truncate", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with _session(orchestrator, other) as session:
        await _say(session, "count")
        assert (await session.truncate(positions={"audio": 50})).answer == "one two"
        await _say(session, "again")
    assert _restored(other.events[0]) == [[(ROLE_USER, "count"), (ROLE_ASSISTANT, "one two")]]


async def test_an_orchestrator_that_knows_an_older_state_forgets_it_first(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    orchestrator.talks.extend(
        [
            [opened(), *FIRST_TURN, Pause.BREAK],
            [opened(known=True, accepted=2, turn=2), "close"],
            [opened(), "commit", committed(3), turn_ended(3), "close"],
        ]
    )
    other.talks.append(
        [opened(), "commit", committed(2), turn_ended(2, "Yo"), granted(accepted=4), "append", Pause.BREAK]
    )
    async with _session(orchestrator, other) as session:
        for line in ("one", "two", "three"):
            await _say(session, line)
    assert numbered(orchestrator.events[1]) == {3: "close"}
    assert [turn[-1] for turn in _restored(orchestrator.events[2])] == [(ROLE_ASSISTANT, "Hi"), (ROLE_ASSISTANT, "Yo")]


async def test_a_full_orchestrator_continues_a_turn_later(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    full = OverloadedError("full", reason="ADMISSION_LIMIT", retry_after_s=0.01)
    again: Talk = ["open", opened(), "commit", committed(2), text(2, "!", position=2), turn_ended(2, "Yo!"), "close"]
    first: Talk = [opened(), *FIRST_TURN, "commit", committed(2), text(2, "Yo"), Pause.BREAK]
    orchestrator.talks.extend([first, again])
    other.talks.append([opened(), "commit", rejected(4, full), "close"])
    async with _session(orchestrator, other) as session:
        await _say(session, "one")
        assert _text_of(await _say(session, "two")) == "Yo!"
    assert len(_restored(orchestrator.events[1])) == 1
    assert orchestrator.events[1][0].open.earlier_calls == 2


async def test_a_turn_that_cannot_continue_ends_with_its_error(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    ended = NotReadyError("the generation has ended", reason="GENERATION_ENDED")
    orchestrator.talks.append([opened(), "commit", committed(1), text(1, "Hi"), Pause.BREAK])
    again: Talk = [opened(), "commit", committed(2), text(2, "Yo"), turn_ended(2, "Yo"), "close"]
    other.talks.extend([[opened(), "commit", rejected(2, ended), "close"], again])
    async with _session(orchestrator, other) as session:
        with pytest.raises(NotReadyError, match="the generation has ended"):
            await _say(session, "one")
        assert _text_of(await _say(session, "two")) == "Yo"
    assert _restored(other.events[1]) == [[(ROLE_USER, "one"), (ROLE_ASSISTANT, "Hi")]]


async def test_a_parked_session_calls_again_with_its_next_event(orchestrator: ScriptedOrchestrator) -> None:
    again: Talk = [opened(known=True, accepted=2, turn=2), "commit", committed(2), turn_ended(2), "close"]
    orchestrator.talks.extend([[opened(), *FIRST_TURN, PARKED], again])
    async with _session(orchestrator) as session:
        await _say(session, "hello")
        await _until(lambda: not session._state.log.is_attached)
        assert len(orchestrator.events) == 1
        await _say(session, "again")
    assert numbered(orchestrator.events[1]) == {3: "append", 4: "commit", 5: "close"}
    assert len(orchestrator.events) == 2


async def test_an_event_that_crosses_the_parking_is_sent_again(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.extend([[opened(), "commit", PARKED], [opened(known=True), *FIRST_TURN, "close"]])
    async with _session(orchestrator) as session:
        assert _text_of(await _say(session, "hello")) == "Hi"


async def test_a_parked_session_is_closed_at_its_orchestrator(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.extend([[opened(), *FIRST_TURN, PARKED], [opened(known=True, accepted=2, turn=2), "close"]])
    async with _session(orchestrator) as session:
        await _say(session, "hello")
        await _until(lambda: not session._state.log.is_attached)
    assert numbered(orchestrator.events[1]) == {3: "close"}


async def test_credit_counts_again_at_another_orchestrator(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    orchestrator.talks.append([opened(limit=100), "append", "append", Pause.BREAK])
    other.talks.append([opened(limit=4), "append", granted(8), *FIRST_TURN, "close"])
    async with _session(orchestrator, other) as session:
        await session.append("1234")
        await session.append("5678")
        await session.commit()
    assert texts(other.events[0]) == ["1234", "5678"]


async def test_rejected_pieces_are_not_restored(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    wrong = rejected(1, NotReadyError("no", reason="TURN_RUNNING"))
    orchestrator.talks.append([opened(), "append", wrong, "append", Pause.BREAK])
    other.talks.append([opened(), rejected(1, NotReadyError("empty")), *FIRST_TURN, "close"])
    async with _session(orchestrator, other) as session:
        await session.append("wrong")
        await _until(lambda: session._state.piece_error is not None)
        with pytest.raises(NotReadyError, match="no"):
            await session.commit()
        await session.append("right")
        assert await session.commit() == 1
    assert texts(other.events[0]) == ["right"]


async def test_a_detected_turn_divides_the_audio(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    detected: Talk = [
        speech(1, begins=True, at_s=0.1),
        speech(1, begins=False, at_s=1.25),
        committed(1, audio_end_s=1.25),
    ]
    orchestrator.talks.append([opened(), "append", "append", *detected, turn_ended(1, "Hi"), "append", Pause.BREAK])
    begins = speech(2, begins=True, at_s=0.5)
    other.talks.append([opened(), "append", "append", begins, committed(2, audio_end_s=1.75), turn_ended(2), "close"])
    second = np.ones(8_000, np.float32)
    async with _session(orchestrator, other, turn_detection={}) as session:
        events = list[SessionEvent]()
        for _ in range(3):
            await session.append(AudioSamples(second, 8_000))
        async for event in session:
            events.append(event)
            if isinstance(event, TurnEnded) and event.turn == 2:
                break
    restored = [event.restore for event in other.events[0] if event.HasField("restore")]
    assert restored[0].messages[0].parts[0].audio.samples.shape == [10_000]
    appended = [event for event in other.events[0] if event.HasField("append")]
    assert [(event.seq, event.append.part.audio.samples.shape[0]) for event in appended] == [(2, 6_000), (3, 8_000)]
    assert [event.at_s for event in events if isinstance(event, SpeechDetected)] == [0.1, 1.25, 1.75]
    assert [event.audio_end_s for event in events if isinstance(event, TurnCommitted)] == [1.25, 3.0]


async def test_turns_that_are_only_detected_are_restored_without_their_audio(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    detected: Talk = [committed(1, audio_end_s=1.0), turn_ended(1)]
    orchestrator.talks.append([opened(), "append", *detected, "append", Pause.BREAK])
    other.talks.append([opened(), "append", committed(2, audio_end_s=1.0), turn_ended(2), "close"])
    second = np.ones(8_000, np.float32)
    async with _session(orchestrator, other, turn_detection={"detects_only": True}) as session:
        for _ in range(2):
            await session.append(AudioSamples(second, 8_000))
        async for event in session:
            if isinstance(event, TurnEnded) and event.turn == 2:
                break
    restored = [event.restore for event in other.events[0] if event.HasField("restore")]
    assert [(each.turn, len(each.messages), each.ByteSize() < 16) for each in restored] == [(1, 1, True)]


async def test_silence_is_not_kept(orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator) -> None:
    grants: Talk = [item for number in range(1, 31) for item in ("append", granted(64 << 20, accepted=number))]
    orchestrator.talks.append([opened(limit=64 << 20), *grants, Pause.BREAK])
    other.talks.append([opened(limit=64 << 20), *FIRST_TURN, "close"])
    async with _session(orchestrator, other, turn_detection={}) as session:
        for number in range(1, 31):
            await session.append(AudioSamples(np.zeros(8_000, np.float32), 8_000))
            await _until(lambda number=number: session._state.log.accepted == number)  # type: ignore[misc]
        await session.commit()
    appended = [event.seq for event in other.events[0] if event.HasField("append")]
    assert appended[-1] == 30
    assert len(appended) <= 12


async def test_the_search_for_a_lost_session_is_bounded(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.extend([[opened(), "append", Pause.BREAK], [Pause.BREAK]])
    policy = RetryPolicy(first_pause_s=0.01, reattach_s=0.5)
    async with AsyncClient(orchestrator.endpoint, retry_policy=policy) as client, client.converse() as session:
        await session.append("hello")
        with pytest.raises(UnavailableError, match="Socket closed"):
            await session.commit()
    assert len(orchestrator.events) > 3


async def test_without_reattaching_a_loss_is_an_error(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), "append", Pause.BREAK])
    policy = RetryPolicy(reattach_s=0)
    async with AsyncClient(orchestrator.endpoint, retry_policy=policy) as client, client.converse() as session:
        await session.append("hello")
        with pytest.raises(UnavailableError):
            await session.commit()
    assert len(orchestrator.events) == 1
