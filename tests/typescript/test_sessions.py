"""Sessions of the client in TypeScript, with scripted orchestrators: each event is sent and received once."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from stagemesh.common.errors import (
    InternalError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse
from stagemesh.v1.request_pb2 import ROLE_ASSISTANT, ROLE_USER
from tests.client.scripted import Pause, ScriptedOrchestrator, Talk, admitted, audio, finished, served
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
from tests.typescript.sessions import SessionFailure, session

FIRST_TURN: Talk = ["commit", committed(1), text(1, "Hi"), turn_ended(1, "Hi")]
ANSWER: Talk = [
    *("commit", committed(1), generated(1, admitted()), text(1, "Hi "), text(1, "you", position=3)),
    *(generated(1, audio([0.5, 1])), generated(1, finished()), turn_ended(1, "Hi you")),
]
PARKED = UnavailableError("idle", reason="SESSION_PARKED")
LOSSES = [Pause.BREAK, UnavailableError("it stops", reason="NOT_RUNNING", retry_after_s=0.01)]


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    async with served() as service:
        yield service


@pytest.fixture
async def other() -> AsyncIterator[ScriptedOrchestrator]:
    """A second orchestrator of the same pipeline."""
    async with served() as service:
        yield service


def restored(events: Sequence[ConverseRequest]) -> list[list[tuple[int, str]]]:
    turns = (event.restore.messages for event in events if event.HasField("restore"))
    return [[(message.role, message.content) for message in messages] for messages in turns]


async def test_a_turn_is_answered(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), *ANSWER, "close"])
    async with session(orchestrator, outputs=["text"]) as talk:
        assert await talk.say("hello") == "Hi you"
    assert talk.kinds == ["opened", "committed", "admitted", "output", "output", "output", "finished", "ended"]
    assert numbered(orchestrator.events[0]) == {1: "append", 2: "commit", 3: "close"}
    assert (list(orchestrator.events[0][0].open.outputs), orchestrator.events[0][0].open.linger_s) == (["text"], 60)


async def test_pieces_of_every_kind_are_appended(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), *ANSWER, "close"])
    image = {"content": {"$case": "image", "value": {"mediaType": "image/png"}}}
    async with session(orchestrator) as talk:
        await talk.do("append", "look", image, {"role": 4, "content": "4", "toolCallId": "c1"})
        await talk.do("audio", 150_000, 16_000)
        await talk.do("commit")
    pieces = [event.append for event in orchestrator.events[0] if event.HasField("append")]
    assert [piece.part.WhichOneof("content") for piece in pieces[:2]] == ["text", "image"]
    assert pieces[2].message.tool_call_id == "c1"
    samples = [piece.part.audio.samples for piece in pieces[3:]]
    assert [(each.shape[0], len(each.inline)) for each in samples] == [
        *[(65_536, 262_144)] * 2,
        (18_928, 75_712),
    ]


async def test_an_append_waits_for_credit(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(limit=4), "append", granted(9, accepted=1), *ANSWER, "close"])
    async with session(orchestrator) as talk:
        await talk.do("append", "1234")
        await talk.do("append", "56789")
        await talk.do("commit")
    assert texts(orchestrator.events[0]) == ["1234", "56789"]


async def test_a_piece_that_is_too_large_is_not_sent(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN, "close"])
    async with session(orchestrator) as talk:
        with pytest.raises(SessionFailure, match="shorten the input") as failure:
            await talk.do("append", {"role": 2, "content": "x" * (8 << 20)})
        assert failure.value.reason == "MESSAGE_TOO_LARGE"
        assert await talk.say("hello") == "Hi"


async def test_rejected_events_are_errors_and_the_session_continues(orchestrator: ScriptedOrchestrator) -> None:
    empty = NotReadyError("turn 1 has no input", reason="EMPTY_TURN")
    wrong = UnsupportedError("no edge carries images")
    pieces: Talk = ["append", rejected(2, wrong), "append", granted(accepted=3)]
    orchestrator.talks.append([opened(), "commit", rejected(1, empty), *pieces, *ANSWER, "close"])
    async with session(orchestrator) as talk:
        with pytest.raises(SessionFailure, match="turn 1 has no input") as failure:
            await talk.do("commit")
        assert failure.value.reason == "EMPTY_TURN"
        await talk.do("append", "wrong")
        await talk.do("append", "right")
        with pytest.raises(SessionFailure, match="no edge carries images"):
            await talk.do("commit")
        assert talk.text(talk.events) == ""
        await talk.do("answer")


async def test_nothing_of_an_interrupted_turn_follows(orchestrator: ScriptedOrchestrator) -> None:
    late: Talk = [text(1, "late", position=6)] * 3
    stop: Talk = [interrupted(1, text=6), *late, turn_ended(1, "Hi you")]
    orchestrator.talks.append([opened(), *ANSWER[:5], "interrupt", *stop, "close"])
    async with session(orchestrator) as talk:
        await talk.do("append", "hello")
        await talk.do("commit")
        stopped = await talk.do("interrupt")
        await talk.do("answer")
    assert [(each["name"], each["position"]) for each in stopped["positions"]] == [("text", 6)]
    assert talk.kinds == ["opened", "committed", "interrupted", "ended"]
    assert orchestrator.events[0][3].interrupt.turn == 1


async def test_a_truncation_names_what_was_heard(orchestrator: ScriptedOrchestrator) -> None:
    confirmed: Talk = ["truncate", truncated(1, "Hi"), "truncate", truncated(1, "H"), "truncate", truncated(1, "")]
    orchestrator.talks.append([opened(), *ANSWER, *confirmed, "close"])
    async with session(orchestrator) as talk:
        await talk.say("hello")
        assert (await talk.do("truncate"))["answer"] == "Hi"
        assert (await talk.do("truncate", {"audioS": 1 / 24_000}))["answer"] == "H"
        await talk.do("truncate", {"positions": {"text": 0}})
    sent = [event.truncate for event in orchestrator.events[0] if event.HasField("truncate")]
    assert [[(at.name, at.position) for at in each.positions] for each in sent] == [
        [("text", 6), ("audio", 2)],
        [("audio", 1)],
        [("text", 0)],
    ]


async def test_a_failed_turn_throws_after_its_events(orchestrator: ScriptedOrchestrator) -> None:
    failed = turn_ended(1, "Hi ", InternalError("the stage failed"))
    again: Talk = ["commit", committed(2), text(2, "ok"), turn_ended(2, "ok")]
    orchestrator.talks.append([opened(), *ANSWER[:4], failed, *again, "close"])
    async with session(orchestrator) as talk:
        with pytest.raises(SessionFailure, match="the stage failed"):
            await talk.say("hello")
        assert talk.kinds[-1] == "ended"
        assert await talk.say("again") == "ok"


async def test_cleared_input_is_withdrawn(orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), "clear", granted(accepted=2), "append", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(1), turn_ended(1), "close"])
    async with session(orchestrator, other) as talk:
        await talk.do("append", "no")
        await talk.do("clear")
        await talk.say("yes")
    assert texts(other.events[0]) == ["yes"]
    assert numbered(other.events[0]) == {1: None, 2: None, 3: "append", 4: "commit", 5: "close"}


@pytest.mark.parametrize("loss", LOSSES, ids=["broken connection", "orchestrator that stops"])
async def test_a_lost_answer_continues(orchestrator: ScriptedOrchestrator, loss: Pause | StagemeshError) -> None:
    first: Talk = [opened(), "commit", committed(1), generated(1, admitted(generation="g")), text(1, "Hi "), loss]
    rest: Talk = [committed(1), text(1, "you", position=3), turn_ended(1, "Hi you")]
    orchestrator.talks.extend([first, ["open", opened(known=True, accepted=2, turn=2), *rest, "close"]])
    async with session(orchestrator) as talk:
        assert await talk.say("hello") == "Hi you"
    assert talk.kinds.count("committed") == 1
    again = orchestrator.events[1]
    assert (again[0].open.turn, positions(again[0]), again[0].open.generation) == (1, {"text": 3}, "g")
    assert (again[0].open.earlier_calls, again[0].open.parameters.seed) == (1, 7)
    assert kinds(again) == ["open", "close"]


async def test_events_after_the_last_handled_one_are_sent_again(orchestrator: ScriptedOrchestrator) -> None:
    first: Talk = [opened(), "append", "append", Pause.BREAK]
    orchestrator.talks.extend([first, [opened(known=True, accepted=1), *FIRST_TURN, "close"]])
    async with session(orchestrator) as talk:
        await talk.do("append", "one", "two")
        await talk.say("three")
    assert numbered(orchestrator.events[1]) == {2: "append", 3: "append", 4: "commit", 5: "close"}


@pytest.mark.parametrize("answer", [committed(1), rejected(2, NotReadyError("no", reason="TURN_RUNNING"))], ids=str)
async def test_a_lost_answer_to_a_commit_is_repeated(
    orchestrator: ScriptedOrchestrator, answer: ConverseResponse
) -> None:
    known: Talk = [opened(known=True, accepted=2, turn=2), answer, turn_ended(1), "close"]
    orchestrator.talks.extend([[opened(), "commit", Pause.BREAK], known])
    async with session(orchestrator) as talk:
        await talk.do("append", "hello")
        if answer == committed(1):
            assert await talk.do("commit") == 1
        else:
            with pytest.raises(SessionFailure, match="no"):
                await talk.do("commit")


async def test_repeated_responses_are_dropped(orchestrator: ScriptedOrchestrator) -> None:
    turn: Talk = [committed(1), text(1, "Hi"), interrupted(1, text=2), turn_ended(1, "Hi"), truncated(1, "H")]
    repeated: Talk = [opened(known=True, accepted=4, turn=2), *turn, "commit", committed(2), turn_ended(2), "close"]
    steps: Talk = [opened(), "commit", *turn[:2], "interrupt", *turn[2:4], "truncate", turn[4], "append", Pause.BREAK]
    orchestrator.talks.extend([steps, repeated])
    async with session(orchestrator) as talk:
        await talk.do("append", "hello")
        await talk.do("commit")
        await talk.do("interrupt")
        await talk.do("truncate", {"positions": {"text": 1}})
        await talk.say("again")
    assert [talk.kinds.count(kind) for kind in ("committed", "interrupted", "ended", "truncated")] == [2, 1, 2, 1]


async def test_another_orchestrator_receives_the_transcript_and_the_kept_events(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN, "commit", committed(2), text(2, "Yo"), Pause.BREAK])
    rest: Talk = ["commit", committed(2), text(2, "!", position=2), turn_ended(2, "Yo!")]
    other.talks.append(["open", opened(), *rest, "close"])
    async with session(orchestrator, other) as talk:
        await talk.say("hello")
        await talk.do("append", "how ", "are")
        assert await talk.say(" you") == "Yo!"
    sent = other.events[0]
    assert kinds(sent) == ["open", "restore", "append", "append", "append", "commit", "close"]
    assert restored(sent) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "Hi")]]
    assert (sent[0].open.turn, positions(sent[0])) == (2, {"text": 2})
    assert numbered(sent) == {3: "append", 4: "append", 5: "append", 6: "commit", 7: "close"}


async def test_the_transcript_has_what_was_heard(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    stop: Talk = ["interrupt", interrupted(1, text=2), turn_ended(1, "Hi"), "truncate", truncated(1, "H")]
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], *stop, "append", Pause.BREAK])
    other.talks.append([opened(), "commit", committed(2), turn_ended(2), "close"])
    async with session(orchestrator, other) as talk:
        await talk.do("append", "hello")
        await talk.do("commit")
        await talk.do("interrupt")
        await talk.do("truncate", {"positions": {"text": 1}})
        await talk.say("again")
    assert restored(other.events[0]) == [[(ROLE_USER, "hello"), (ROLE_ASSISTANT, "H")]]
    # An event that had its effect keeps its number and loses its content.
    assert numbered(other.events[0]) == {3: None, 4: None, 5: "append", 6: "commit", 7: "close"}


async def test_what_a_lost_orchestrator_did_not_confirm_is_confirmed_here(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    sound = generated(1, audio([0.0] * 100))
    answer: Talk = [text(1, "one two three four"), sound, turn_ended(1, "one two three four")]
    orchestrator.talks.append([opened(), "commit", committed(1), *answer, "truncate", Pause.BREAK])
    second: Talk = [opened(), "commit", committed(2), text(2, "Yo"), "interrupt", Pause.BREAK]
    third: Talk = [opened(), "commit", committed(3), turn_ended(3), "close"]
    other.talks.append(second)
    orchestrator.talks.append(third)
    async with session(orchestrator, other) as talk:
        await talk.say("count")
        assert (await talk.do("truncate", {"positions": {"audio": 50}}))["answer"] == "one two"
        await talk.do("append", "again")
        await talk.do("commit")
        assert [each["position"] for each in (await talk.do("interrupt"))["positions"]] == [2]
        await talk.say("more")
    assert restored(other.events[0]) == [[(ROLE_USER, "count"), (ROLE_ASSISTANT, "one two")]]
    assert restored(orchestrator.events[1])[1] == [(ROLE_USER, "again"), (ROLE_ASSISTANT, "Yo")]


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
    async with session(orchestrator, other) as talk:
        for line in ("one", "two", "three"):
            await talk.say(line)
    assert numbered(orchestrator.events[1]) == {3: "close"}
    assert [turn[-1] for turn in restored(orchestrator.events[2])] == [(ROLE_ASSISTANT, "Hi"), (ROLE_ASSISTANT, "Yo")]


async def test_a_full_orchestrator_continues_a_turn_later(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    full = OverloadedError("full", reason="ADMISSION_LIMIT", retry_after_s=0.01)
    again: Talk = ["open", opened(), "commit", committed(2), text(2, "!", position=2), turn_ended(2, "Yo!"), "close"]
    first: Talk = [opened(), *FIRST_TURN, "commit", committed(2), text(2, "Yo"), Pause.BREAK]
    orchestrator.talks.extend([first, again])
    other.talks.append([opened(), "commit", rejected(4, full), "close"])
    async with session(orchestrator, other) as talk:
        await talk.say("one")
        assert await talk.say("two") == "Yo!"
    assert len(restored(orchestrator.events[1])) == 1
    assert orchestrator.events[1][0].open.earlier_calls == 2


async def test_a_turn_that_cannot_continue_ends_with_its_error(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    ended = NotReadyError("the generation has ended", reason="GENERATION_ENDED")
    orchestrator.talks.append([opened(), "commit", committed(1), text(1, "Hi"), Pause.BREAK])
    again: Talk = [opened(), "commit", committed(2), text(2, "Yo"), turn_ended(2, "Yo"), "close"]
    other.talks.extend([[opened(), "commit", rejected(2, ended), "close"], again])
    async with session(orchestrator, other) as talk:
        with pytest.raises(SessionFailure, match="the generation has ended"):
            await talk.say("one")
        assert await talk.say("two") == "Yo"
    assert restored(other.events[1]) == [[(ROLE_USER, "one"), (ROLE_ASSISTANT, "Hi")]]


async def test_a_parked_session_calls_again_with_its_next_event(orchestrator: ScriptedOrchestrator) -> None:
    again: Talk = [opened(known=True, accepted=2, turn=2), "commit", committed(2), turn_ended(2), "close"]
    orchestrator.talks.extend([[opened(), *FIRST_TURN, PARKED], again])
    async with session(orchestrator) as talk:
        await talk.say("hello")
        await talk.say("again")
    assert numbered(orchestrator.events[1]) == {3: "append", 4: "commit", 5: "close"}
    assert len(orchestrator.events) == 2


async def test_credit_counts_again_at_another_orchestrator(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    orchestrator.talks.append([opened(limit=100), "append", "append", Pause.BREAK])
    other.talks.append([opened(limit=4), "append", granted(8), *FIRST_TURN, "close"])
    async with session(orchestrator, other) as talk:
        await talk.do("append", "1234", "5678")
        await talk.do("commit")
    assert texts(other.events[0]) == ["1234", "5678"]


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
    async with session(orchestrator, other, turnDetection={}) as talk:
        for _ in range(3):
            await talk.do("audio", 8_000, 8_000)
        await talk.do("read", "ended")
        await talk.do("read", "ended")
    restored_turns = [event.restore for event in other.events[0] if event.HasField("restore")]
    assert restored_turns[0].messages[0].parts[0].audio.samples.shape == [10_000]
    appended = [event for event in other.events[0] if event.HasField("append")]
    assert [(event.seq, event.append.part.audio.samples.shape[0]) for event in appended] == [(2, 6_000), (3, 8_000)]
    values = {
        kind: [each["value"] for each in talk.events if each["$case"] == kind] for kind in ("speech", "committed")
    }
    assert [value["atS"] for value in values["speech"]] == [0.1, 1.25, 1.75]
    assert [value["audioEndS"] for value in values["committed"]] == [1.25, 3.0]


async def test_silence_is_not_kept(orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator) -> None:
    grants: Talk = [item for number in range(1, 31) for item in ("append", granted(64_000, accepted=number))]
    orchestrator.talks.append([opened(limit=32_000), *_widening(grants), Pause.BREAK])
    other.talks.append([opened(limit=64 << 20), *FIRST_TURN, "close"])
    async with session(orchestrator, other, turnDetection={}) as talk:
        for _ in range(30):
            await talk.do("audio", 8_000, 8_000)
        await talk.do("commit")
    appended = [event.seq for event in other.events[0] if event.HasField("append")]
    assert appended[-1] == 30
    assert len(appended) <= 13


def _widening(grants: Talk) -> Talk:
    """Makes each grant of a second of audio the credit for the next one, so that each waits for the former."""
    second_bytes = 4 * 8_000
    return [
        granted((index // 2 + 2) * second_bytes, accepted=index // 2 + 1) if index % 2 else item
        for index, item in enumerate(grants)
    ]


async def test_an_error_of_the_session_ends_it(orchestrator: ScriptedOrchestrator) -> None:
    wrong = InvalidRequestError("event 3 follows event 1", reason="EVENT_GAP")
    orchestrator.talks.append([opened(), "append", "commit", wrong])
    with pytest.raises(SessionFailure, match="event 3 follows event 1") as failure:
        async with session(orchestrator) as talk:
            await talk.do("append", "hello")
            await talk.do("commit")
    assert failure.value.reason == "EVENT_GAP"


async def test_a_session_that_cannot_be_opened_throws(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([UnsupportedError("no stage detects turns")])
    with pytest.raises(SessionFailure, match="no stage detects turns"):
        async with session(orchestrator, turnDetection={}):
            pass


async def test_a_session_of_another_client_is_not_taken_over(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(known=True, accepted=5)])
    with pytest.raises(SessionFailure, match="another client"):
        async with session(orchestrator, sessionId="s"):
            pass


async def test_an_unknown_kind_closes_the_session(orchestrator: ScriptedOrchestrator) -> None:
    unknown = ConverseResponse.FromString(b"\xa2\x06\x00")  # field 100
    ignorable = ConverseResponse.FromString(b"\xa2\x06\x00\x78\x01")
    orchestrator.talks.append([opened(), ignorable, "append", unknown, "close"])
    async with session(orchestrator) as talk:
        await talk.do("append", "hello")
        with pytest.raises(SessionFailure, match="unknown kind") as failure:
            await talk.do("read", "ended")
        assert failure.value.reason == "UNKNOWN_KIND"
    async with asyncio.timeout(5):
        while kinds(orchestrator.events[0]) != ["open", "append", "close"]:
            await asyncio.sleep(0)
