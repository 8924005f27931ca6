"""Sessions of every client against a scripted orchestrator."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from stagemesh.client import AudioSamples, ImageFile, Message
from stagemesh.common import errors
from stagemesh.conformance.replicas import until
from stagemesh.v1.orchestrator_pb2 import ConverseResponse
from tests.client.scripted import ScriptedOrchestrator, Talk, TalkItem, admitted, audio, finished
from tests.client.scripted_sessions import (
    committed,
    generated,
    granted,
    interrupted,
    kinds,
    numbered,
    opened,
    rejected,
    speech,
    text,
    texts,
    truncated,
    turn_ended,
)
from tests.client.session_drivers import Converse, SessionDriver
from tests.rpc.call_errors import raises

ANSWER: Talk = [
    *("commit", committed(1), generated(1, admitted()), text(1, "Hi "), text(1, "you", position=3)),
    *(generated(1, audio([0.5, 1])), generated(1, finished()), turn_ended(1, "Hi you")),
]


def open_session(
    converse: Converse, orchestrator: ScriptedOrchestrator, *script: TalkItem, **arguments: Any
) -> AbstractAsyncContextManager[SessionDriver]:
    """Opens a session at an orchestrator that opens it, follows a script and expects its close."""
    orchestrator.talks.append([opened(), *script, "close"])
    return converse(orchestrator, **arguments)


async def test_a_turn_is_answered(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    async with open_session(converse, orchestrator, *ANSWER, outputs=["text"]) as talk:
        assert await talk.ask("hello") == 1
        assert await talk.answer() == "Hi you"
    assert talk.kinds == ["opened", "committed", "admitted", "text", "text", "audio", "finished", "ended"]
    assert [event.turn for event in talk.events if event.kind in {"text", "audio", "finished"}] == [1, 1, 1, 1]
    assert numbered(orchestrator.events[0]) == {1: "append", 2: "commit", 3: "close"}
    assert (list(orchestrator.events[0][0].open.outputs), orchestrator.events[0][0].open.linger_s) == (["text"], 60)


async def test_pieces_of_every_kind_are_appended(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    samples = AudioSamples(np.zeros(8, np.float32), 16_000)
    async with open_session(converse, orchestrator, *ANSWER) as talk:
        await talk.append("look", ImageFile(b"png", "image/png"), samples, Message("tool", "4", (), "c1"))
        await talk.commit()
    pieces = [event.append for event in orchestrator.events[0] if event.HasField("append")]
    assert [piece.part.WhichOneof("content") for piece in pieces[:3]] == ["text", "image", "audio"]
    assert pieces[3].message.tool_call_id == "c1"


async def test_long_audio_is_divided(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    async with open_session(converse, orchestrator, *ANSWER) as talk:
        await talk.append(AudioSamples(np.arange(150_000, dtype=np.float32), 16_000))
        await talk.commit()
    pieces = [event.append.part.audio.samples for event in orchestrator.events[0] if event.HasField("append")]
    assert [piece.shape[0] for piece in pieces] == [65_536, 65_536, 18_928]
    assert b"".join(piece.inline for piece in pieces) == np.arange(150_000, dtype=np.float32).tobytes()


async def test_an_append_waits_for_credit(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    orchestrator.talks.append([opened(limit=4), "append", granted(9, accepted=1), *ANSWER, "close"])
    async with converse(orchestrator) as talk:
        await talk.ask("1234", "56789")
    assert texts(orchestrator.events[0]) == ["1234", "56789"]


async def test_a_piece_that_is_too_large_is_not_sent(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    async with open_session(converse, orchestrator, *ANSWER) as talk:
        with raises(errors.InvalidRequestError, reason="MESSAGE_TOO_LARGE", match="shorten the input"):
            await talk.append(Message("user", "x" * (8 << 20)))
        assert await talk.say("hello") == "Hi you"


async def test_a_rejected_commit_raises_its_error(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    empty = errors.NotReadyError("turn 1 has no input", reason="EMPTY_TURN")
    async with open_session(converse, orchestrator, "commit", rejected(1, empty), *ANSWER) as talk:
        with raises(errors.NotReadyError, reason="EMPTY_TURN", match="turn 1 has no input"):
            await talk.commit()
        assert await talk.ask("hello") == 1


async def test_a_rejected_piece_fails_the_next_call(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    wrong = rejected(1, errors.UnsupportedError("no edge carries images"))
    async with open_session(converse, orchestrator, "append", wrong, "append", granted(accepted=2), *ANSWER) as talk:
        await talk.append("wrong")
        with pytest.raises(errors.UnsupportedError, match="no edge carries images"):
            await talk.ask("right")


async def test_nothing_of_an_interrupted_turn_follows(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    late: Talk = [text(1, "late", position=6)] * 3
    stop: Talk = [interrupted(1, text=6), *late, turn_ended(1, "Hi you")]
    async with open_session(converse, orchestrator, *ANSWER[:5], "interrupt", *stop) as talk:
        await talk.ask("hello")
        assert await talk.interrupt() == {"text": 6}
        await talk.read_answer()
    assert talk.kinds == ["opened", "committed", "interrupted", "ended"]
    assert talk.seen("interrupted", "detected") == [False]
    assert orchestrator.events[0][3].interrupt.turn == 1


async def test_an_ended_turn_cannot_be_interrupted(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    ended = errors.NotReadyError("turn 1 has ended", reason="TURN_ENDED")
    async with open_session(converse, orchestrator, *ANSWER, "interrupt", rejected(3, ended)) as talk:
        await talk.ask("hello")
        with pytest.raises(errors.NotReadyError, match="turn 1 has ended"):
            await talk.interrupt()


async def test_a_truncation_names_what_was_heard(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    answers = ["Hi", "Hi you", "H", ""]
    confirmed: Talk = [item for answer in answers for item in ("truncate", truncated(1, answer))]
    async with open_session(converse, orchestrator, *ANSWER, *confirmed) as talk:
        await talk.ask("hello")
        await talk.read("text")
        heard = [await talk.truncate()]
        await talk.read_answer()
        heard += [await talk.truncate(), await talk.truncate(audio_s=1 / 24_000)]
        heard.append(await talk.truncate(positions={"text": 0}))
    assert heard == answers
    sent = [event.truncate for event in orchestrator.events[0] if event.HasField("truncate")]
    assert {each.turn for each in sent} == {1}
    first, *others = [{at.name: at.position for at in each.positions} for each in sent]
    # The audio may have arrived, but was not read.
    assert first in ({"text": 3}, {"text": 3, "audio": 0})
    assert others == [{"text": 6, "audio": 2}, {"audio": 1}, {"text": 0}]


async def test_a_text_is_truncated_between_characters(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    answer = "Zoë 🙂"
    turn: Talk = ["commit", committed(1), text(1, answer), turn_ended(1, answer)]
    confirmed: Talk = ["truncate", truncated(1, answer), "truncate", truncated(1, "Zoë")]
    async with open_session(converse, orchestrator, *turn, *confirmed) as talk:
        await talk.ask("hello")
        await talk.read_answer()
        assert await talk.truncate() == answer
        for position in (3, 6, 7, 8):
            with raises(errors.InvalidRequestError, reason="INVALID_POSITION", match=f"position {position} is within"):
                await talk.truncate(positions={"text": position})
        assert await talk.truncate(positions={"text": 4}) == "Zoë"
    sent = [event.truncate for event in orchestrator.events[0] if event.HasField("truncate")]
    assert [[at.position for at in each.positions] for each in sent] == [[9], [4]]


async def test_audio_cannot_be_truncated_without_audio(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    async with open_session(converse, orchestrator, *ANSWER[:2], turn_ended(1)) as talk:
        await talk.ask("hello")
        with pytest.raises(errors.NotFoundError, match="produced no audio"):
            await talk.truncate(audio_s=1.0)


async def test_a_clear_withdraws_the_input(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    async with open_session(converse, orchestrator, "clear", granted(accepted=2), *ANSWER) as talk:
        await talk.append("no")
        await talk.clear()
        await talk.ask("yes")
    assert kinds(orchestrator.events[0]) == ["open", "append", "clear", "append", "commit", "close"]


async def test_cleared_streamed_input_ends_its_turn(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    cleared: Talk = [interrupted(1), turn_ended(1), granted(accepted=2)]
    script: Talk = ["append", text(1, "wrong"), "clear", text(1, "late", position=5), *cleared]
    again: Talk = ["commit", committed(2), text(2, "right"), turn_ended(2)]
    async with open_session(converse, orchestrator, *script, *again, input_mode="stream") as talk:
        await talk.append("no")
        await talk.clear()
        assert await talk.ask("yes") == 2
        assert await talk.answer() == "right"


async def test_a_failed_turn_raises_after_its_events(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    failed = turn_ended(1, "Hi ", errors.InternalError("the stage failed"))
    again: Talk = ["commit", committed(2), text(2, "ok"), turn_ended(2, "ok")]
    async with open_session(converse, orchestrator, *ANSWER[:4], failed, *again) as talk:
        with pytest.raises(errors.InternalError, match="the stage failed"):
            await talk.say("hello")
        assert talk.kinds[-1] == "ended"
        assert await talk.say("again") == "ok"


async def test_detected_turns_and_speech_are_events(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    begins, ends = speech(1, begins=True, at_s=0.25), speech(1, begins=False, at_s=0.5)
    turn: Talk = [begins, ends, committed(1, audio_end_s=0.75), text(1, "Hi"), turn_ended(1, "Hi")]
    async with open_session(converse, orchestrator, "append", *turn, turn_detection={}) as talk:
        await talk.append(AudioSamples(np.zeros(16_000, np.float32), 16_000))
        await talk.read("ended")
    assert talk.kinds == ["opened", "speech", "speech", "committed", "text", "ended"]
    assert talk.seen("speech", "at_s") == [0.25, 0.5]
    assert (talk.events[3].turn, talk.seen("committed", "detected")) == (1, [True])
    assert talk.seen("committed", "audio_end_s") == [0.75]


async def test_an_error_of_the_session_ends_it(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    wrong = errors.InvalidRequestError("event 3 follows event 1", reason="EVENT_GAP")
    # The error follows the last event: grpc.aio replaces the status of a call that ends while an event is written.
    orchestrator.talks.append([opened(), "append", "commit", wrong])
    with raises(errors.InvalidRequestError, reason="EVENT_GAP", match="event 3 follows event 1"):
        async with converse(orchestrator) as talk:
            await talk.append("hello")
            with pytest.raises(errors.InvalidRequestError, match="event 3 follows event 1"):
                await talk.commit()
            await talk.read("ended")


async def test_a_session_that_cannot_be_opened_raises(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    orchestrator.talks.append([errors.UnsupportedError("no stage detects turns")])
    with pytest.raises(errors.UnsupportedError, match="no stage detects turns"):
        async with converse(orchestrator, turn_detection={}):
            pass


async def test_the_session_of_another_is_not_taken(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    orchestrator.talks.append([opened(known=True, accepted=5)])
    with pytest.raises(errors.ExistsError, match="another client"):
        async with converse(orchestrator, session_id="s"):
            pass


async def test_an_unknown_kind_closes_the_session(orchestrator: ScriptedOrchestrator, converse: Converse) -> None:
    unknown = ConverseResponse.FromString(b"\xa2\x06\x00")  # field 100
    ignorable = ConverseResponse.FromString(b"\xa2\x06\x00\x78\x01")
    async with open_session(converse, orchestrator, ignorable, "append", unknown) as talk:
        await talk.append("hello")
        with raises(errors.UnsupportedError, reason="UNKNOWN_KIND", match="unknown kind"):
            await talk.read("ended")
    await until(lambda: kinds(orchestrator.events[0]) == ["open", "append", "close"], timeout_s=5)
