"""Tests that a session survives the loss of its connection or orchestrator, with each event sent and received once."""

from collections.abc import Sequence

import numpy as np
import pytest

from stagemesh.client import AudioSamples
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
from tests.client.session_drivers import Converse

PARKED = UnavailableError("idle", reason="SESSION_PARKED")
FIRST_TURN: Talk = ["commit", committed(1), text(1, "Hi"), turn_ended(1, "Hi")]
SECOND = AudioSamples(np.ones(8_000, np.float32), 8_000)


def _restored(events: Sequence[ConverseRequest]) -> list[list[tuple[int, str]]]:
    turns = (event.restore.messages for event in events if event.HasField("restore"))
    return [[(message.role, message.content) for message in messages] for messages in turns]


LOSSES = [Pause.BREAK, UnavailableError("it stops", reason="NOT_RUNNING", retry_after_s=0.01)]


@pytest.mark.parametrize("loss", LOSSES, ids=["broken connection", "orchestrator that stops"])
async def test_a_lost_answer_continues(
    orchestrator: ScriptedOrchestrator, converse: Converse, loss: Pause | StagemeshError
) -> None:
    first: Talk = [opened(), "commit", committed(1), generated(1, admitted(generation="g")), text(1, "Hi "), loss]
    rest: Talk = [committed(1), text(1, "you", position=3), turn_ended(1, "Hi you")]
    orchestrator.talks.extend([first, ["open", opened(known=True, accepted=2, turn=2), *rest, "close"]])
    async with converse(orchestrator) as talk:
        assert await talk.say("hello") == "Hi you"
    assert talk.kinds.count("committed") == 1
    again = orchestrator.events[1]
    assert (again[0].open.turn, positions(again[0]), again[0].open.generation) == (1, {"text": 3}, "g")
    assert (again[0].open.earlier_calls, again[0].open.parameters.seed) == (1, 7)
    assert kinds(again) == ["open", "close"]


async def test_unhandled_events_are_sent_again(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    first: Talk = [opened(), "append", "append", Pause.BREAK]
    orchestrator.talks.extend([first, [opened(known=True, accepted=1), *FIRST_TURN, "close"]])
    async with converse(orchestrator) as talk:
        await talk.append("one")
        await talk.append("two")
        await talk.say("three")
    assert numbered(orchestrator.events[1]) == {2: "append", 3: "append", 4: "commit", 5: "close"}


@pytest.mark.parametrize("answer", [committed(1), rejected(2, NotReadyError("no", reason="TURN_RUNNING"))], ids=str)
async def test_a_lost_answer_to_a_commit_is_repeated(
    orchestrator: ScriptedOrchestrator, converse: Converse, answer: ConverseResponse
) -> None:
    known: Talk = [opened(known=True, accepted=2, turn=2), answer, turn_ended(1), "close"]
    orchestrator.talks.extend([[opened(), "commit", Pause.BREAK], known])
    async with converse(orchestrator) as talk:
        await talk.append("hello")
        if answer == committed(1):
            assert await talk.commit() == 1
        else:
            with pytest.raises(NotReadyError, match="no"):
                await talk.commit()


async def test_repeated_responses_are_dropped(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    turn: Talk = [committed(1), text(1, "Hi"), interrupted(1, text=2), turn_ended(1, "Hi"), truncated(1, "H")]
    repeated: Talk = [opened(known=True, accepted=4, turn=2), *turn, "commit", committed(2), turn_ended(2), "close"]
    steps: Talk = [opened(), "commit", *turn[:2], "interrupt", *turn[2:4], "truncate", turn[4], "append", Pause.BREAK]
    orchestrator.talks.extend([steps, repeated])
    async with converse(orchestrator) as talk:
        await talk.ask("hello")
        await talk.interrupt()
        await talk.truncate(positions={"text": 1})
        await talk.say("again")
    assert [talk.kinds.count(kind) for kind in ("committed", "interrupted", "ended", "truncated")] == [2, 1, 2, 1]


async def test_another_orchestrator_receives_the_transcript_and_the_kept_events(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN, "commit", committed(2), text(2, "Yo"), Pause.BREAK])
    rest: Talk = ["commit", committed(2), text(2, "!", position=2), turn_ended(2, "Yo!")]
    other.talks.append(["open", opened(), *rest, "close"])
    async with converse(orchestrator, other) as talk:
        await talk.say("hello")
        await talk.append("how ", "are")
        assert await talk.say(" you") == "Yo!"
    sent = other.events[0]
    assert kinds(sent) == ["open", "restore", "append", "append", "append", "commit", "close"]
    assert _restored(sent) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "Hi")]]
    assert (sent[0].open.turn, positions(sent[0])) == (2, {"text": 2})
    assert numbered(sent) == {3: "append", 4: "append", 5: "append", 6: "commit", 7: "close"}


async def test_the_transcript_has_what_was_heard(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    stop: Talk = ["interrupt", interrupted(1, text=2), turn_ended(1, "Hi"), "truncate", truncated(1, "H")]
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], *stop, "append", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with converse(orchestrator, other) as talk:
        await talk.ask("hello")
        await talk.interrupt()
        await talk.truncate(positions={"text": 1})
        await talk.say("again")
    assert _restored(other.events[0]) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "H")]]
    # An event that had its effect keeps its number and loses its content.
    assert numbered(other.events[0]) == {3: None, 4: None, 5: "append", 6: "commit", 7: "close"}


async def test_an_interruption_is_confirmed_although_the_orchestrator_is_lost(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], "interrupt", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with converse(orchestrator, other) as talk:
        await talk.ask("hello")
        assert await talk.interrupt() == {"text": 2}
        await talk.say("again")
    assert _restored(other.events[0]) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "Hi")]]
    assert [event.turn for event in talk.events if event.kind == "ended"] == [1, 2]
    assert talk.seen("ended", "answer") == ["Hi", ""]
    assert not any(event.fields.get("error") for event in talk.events if event.kind == "ended")


@pytest.mark.parametrize("heard", [{"audio": 50}, {"text": 9}], ids=str)
async def test_a_truncation_is_confirmed_although_the_orchestrator_is_lost(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse, heard: dict[str, int]
) -> None:
    sound = generated(1, audio([0.0] * 100))
    answer: Talk = [text(1, "öne twö three four"), sound, turn_ended(1, "öne twö three four")]
    orchestrator.talks.append([opened(), "commit", committed(1), *answer, "truncate", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with converse(orchestrator, other) as talk:
        await talk.say("count")
        assert await talk.truncate(positions=heard) == "öne twö"
        await talk.say("again")
    assert _restored(other.events[0]) == [[(ROLE_USER, "count"), (ROLE_ASSISTANT, "öne twö")]]


async def test_an_orchestrator_that_knows_an_older_state_forgets_it_first(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN, Pause.BREAK])
    orchestrator.talks.append([opened(known=True, accepted=2, turn=2), "close"])
    orchestrator.talks.append([opened(), "commit", committed(3), turn_ended(3), "close"])
    second: Talk = ["commit", committed(2), turn_ended(2, "Yo"), granted(accepted=4), "append", Pause.BREAK]
    other.talks.append([opened(), *second])
    async with converse(orchestrator, other) as talk:
        for line in ("one", "two", "three"):
            await talk.say(line)
    assert numbered(orchestrator.events[1]) == {3: "close"}
    assert [turn[-1] for turn in _restored(orchestrator.events[2])] == [(ROLE_ASSISTANT, "Hi"), (ROLE_ASSISTANT, "Yo")]


async def test_a_full_orchestrator_continues_a_turn_later(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    full = OverloadedError("full", reason="ADMISSION_LIMIT", retry_after_s=0.01)
    again: Talk = ["open", opened(), "commit", committed(2), text(2, "!", position=2), turn_ended(2, "Yo!"), "close"]
    first: Talk = [opened(), *FIRST_TURN, "commit", committed(2), text(2, "Yo"), Pause.BREAK]
    orchestrator.talks.extend([first, again])
    other.talks.append([opened(), "commit", rejected(4, full), "close"])
    async with converse(orchestrator, other) as talk:
        await talk.say("one")
        assert await talk.say("two") == "Yo!"
    assert len(_restored(orchestrator.events[1])) == 1
    assert orchestrator.events[1][0].open.earlier_calls == 2


async def test_a_turn_that_cannot_continue_ends_with_its_error(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    ended = NotReadyError("the generation has ended", reason="GENERATION_ENDED")
    orchestrator.talks.append([opened(), "commit", committed(1), text(1, "Hi"), Pause.BREAK])
    again: Talk = [opened(), "commit", committed(2), text(2, "Yo"), turn_ended(2, "Yo"), "close"]
    other.talks.extend([[opened(), "commit", rejected(2, ended), "close"], again])
    async with converse(orchestrator, other) as talk:
        with pytest.raises(NotReadyError, match="the generation has ended"):
            await talk.say("one")
        assert await talk.say("two") == "Yo"
    assert _restored(other.events[1]) == [[(ROLE_USER, "one"), (ROLE_ASSISTANT, "Hi")]]


async def test_cleared_input_is_withdrawn(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    orchestrator.talks.append([opened(), "clear", granted(accepted=2), "append", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(1), turn_ended(1), "close"])
    async with converse(orchestrator, other) as talk:
        await talk.append("no")
        await talk.clear()
        await talk.say("yes")
    assert texts(other.events[0]) == ["yes"]
    assert numbered(other.events[0]) == {1: None, 2: None, 3: "append", 4: "commit", 5: "close"}


async def test_a_parked_session_calls_with_its_event(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    again: Talk = [opened(known=True, accepted=2, turn=2), "commit", committed(2), turn_ended(2), "close"]
    orchestrator.talks.extend([[opened(), *FIRST_TURN, PARKED], again])
    async with converse(orchestrator) as talk:
        await talk.say("hello")
        await talk.detached()
        assert len(orchestrator.events) == 1
        await talk.say("again")
    assert numbered(orchestrator.events[1]) == {3: "append", 4: "commit", 5: "close"}
    assert len(orchestrator.events) == 2


async def test_an_event_during_parking_is_sent_again(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    orchestrator.talks.extend([[opened(), "commit", PARKED], [opened(known=True), *FIRST_TURN, "close"]])
    async with converse(orchestrator) as talk:
        assert await talk.say("hello") == "Hi"


async def test_a_parked_session_is_closed_remotely(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    orchestrator.talks.extend([[opened(), *FIRST_TURN, PARKED], [opened(known=True, accepted=2, turn=2), "close"]])
    async with converse(orchestrator) as talk:
        await talk.say("hello")
        await talk.detached()
    assert numbered(orchestrator.events[1]) == {3: "close"}


async def test_credit_counts_again_at_another_orchestrator(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    orchestrator.talks.append([opened(limit=100), "append", "append", Pause.BREAK])
    other.talks.append([opened(limit=4), "append", granted(8), *FIRST_TURN, "close"])
    async with converse(orchestrator, other) as talk:
        await talk.ask("1234", "5678")
    assert texts(other.events[0]) == ["1234", "5678"]


async def test_a_detected_turn_divides_the_audio(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    begins, ends = speech(1, begins=True, at_s=0.1), speech(1, begins=False, at_s=1.25)
    first: Talk = [begins, ends, committed(1, audio_end_s=1.25), turn_ended(1, "Hi")]
    orchestrator.talks.append([opened(), "append", "append", *first, "append", Pause.BREAK])
    begins = speech(2, begins=True, at_s=0.5)
    other.talks.append([opened(), "append", "append", begins, committed(2, audio_end_s=1.75), turn_ended(2), "close"])
    async with converse(orchestrator, other, turn_detection={}) as talk:
        for _ in range(3):
            await talk.append(SECOND)
        await talk.read("ended", 2)
    (restored, *_) = [event.restore for event in other.events[0] if event.HasField("restore")]
    assert restored.messages[0].parts[0].audio.samples.shape == [10_000]
    appended = [event for event in other.events[0] if event.HasField("append")]
    assert [(event.seq, event.append.part.audio.samples.shape[0]) for event in appended] == [(2, 6_000), (3, 8_000)]
    assert talk.seen("speech", "at_s") == [0.1, 1.25, 1.75]
    assert talk.seen("committed", "audio_end_s") == [1.25, 3.0]


async def test_silence_is_not_kept(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator, converse: Converse
) -> None:
    # Each grant is the credit for the next second of audio: each append waits for the former grant.
    second_bytes = SECOND.samples.nbytes
    grants: Talk = [item for n in range(1, 31) for item in ("append", granted((n + 1) * second_bytes, accepted=n))]
    orchestrator.talks.append([opened(limit=second_bytes), *grants, Pause.BREAK])
    other.talks.append([opened(limit=64 << 20), *FIRST_TURN, "close"])
    async with converse(orchestrator, other, turn_detection={}) as talk:
        for _ in range(30):
            await talk.append(SECOND)
        await talk.commit()
    appended = [event.seq for event in other.events[0] if event.HasField("append")]
    assert appended[-1] == 30
    assert len(appended) <= 12
