"""Sessions of the asynchronous client against a scripted orchestrator."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from stagemesh.client import (
    AsyncClient,
    AsyncSession,
    AudioSamples,
    ImageFile,
    Message,
    RetryPolicy,
    SessionEvent,
    SessionOpened,
    Text,
    TurnCommitted,
    TurnEnded,
    TurnInterrupted,
)
from stagemesh.client.responses import Admitted, AudioChunk, Finished
from stagemesh.common.errors import (
    ExistsError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    UnsupportedError,
)
from stagemesh.v1 import orchestrator_pb2
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

QUICK = RetryPolicy(attempts=3, first_pause_s=0.01, max_pause_s=0.1, reattach_s=5)
ANSWER: Talk = [
    "commit",
    committed(1),
    generated(1, admitted()),
    text(1, "Hi "),
    text(1, "you", position=3),
    generated(1, audio([0.5, 1])),
    generated(1, finished()),
    turn_ended(1, "Hi you"),
]


@pytest.fixture
async def client(orchestrator: ScriptedOrchestrator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(orchestrator.endpoint, retry_policy=QUICK) as made:
        yield made


@asynccontextmanager
async def _conversation(
    orchestrator: ScriptedOrchestrator, client: AsyncClient, *script: TalkItem, **arguments: Any
) -> AsyncGenerator[AsyncSession]:
    """Opens a session whose script continues with these items. Closes it at the end of the block."""
    orchestrator.talks.append([opened(), *script, "close"])
    async with client.converse(**arguments) as session:
        yield session


async def _commit(session: AsyncSession, text: str) -> None:
    await session.append(text)
    await session.commit()


def _text_of(events: list[SessionEvent]) -> str:
    return "".join(event.delta for event in events if isinstance(event, Text))


async def _answer(session: AsyncSession) -> list[SessionEvent]:
    return [event async for event in session.answer()]


async def test_a_turn_is_answered(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    async with _conversation(orchestrator, client, *ANSWER, outputs=["text"]) as session:
        await session.append("hello")
        assert await session.commit() == 1
        events = await _answer(session)
    kinds_of = [type(event) for event in events]
    assert kinds_of == [SessionOpened, TurnCommitted, Admitted, Text, Text, AudioChunk, Finished, TurnEnded]
    assert [event.turn for event in events if isinstance(event, Text | AudioChunk | Finished)] == [1, 1, 1, 1]
    assert _text_of(events) == "Hi you"


async def test_events_are_numbered(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    async with _conversation(orchestrator, client, *ANSWER) as session:
        await _commit(session, "hello")
    assert numbered(orchestrator.events[0]) == {1: "append", 2: "commit", 3: "close"}


async def test_arguments_reach_the_server(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append(["open", opened(), "close"])
    async with client.converse(
        messages=[("system", "Be brief.")],
        outputs=["audio"],
        max_tokens=9,
        seed=4,
        turn_detection={"options": {"silence_ms": 300}, "interrupts": True},
        turn_timeout_s=2.5,
        caller="me",
    ) as session:
        assert (session.opened.seed, session.opened.outputs) == (7, ("text", "audio"))
    sent = orchestrator.events[0][0].open
    assert (sent.session_id, list(sent.outputs), sent.caller) == (session.session_id, ["audio"], "me")
    assert (sent.conversation.messages[0].content, sent.parameters.sampling.max_tokens) == ("Be brief.", 9)
    assert (sent.turn_detection.options["silence_ms"].integer, sent.turn_detection.interrupts) == (300, True)
    assert (sent.turn_timeout_s, sent.linger_s, sent.parameters.seed) == (2.5, 60, 4)
    assert sent.input_mode == orchestrator_pb2.INPUT_MODE_PROMPT


async def test_pieces_of_every_kind_are_appended(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    samples = AudioSamples(np.zeros(8, np.float32), 16_000)
    async with _conversation(orchestrator, client, *ANSWER) as session:
        await session.append("look", ImageFile(b"png", "image/png"), samples, Message("tool", "4", (), "c1"))
        await session.commit()
    pieces = [event.append for event in orchestrator.events[0] if event.HasField("append")]
    assert [piece.part.WhichOneof("content") for piece in pieces[:3]] == ["text", "image", "audio"]
    assert pieces[3].message.tool_call_id == "c1"


async def test_long_audio_is_divided(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    async with _conversation(orchestrator, client, *ANSWER) as session:
        await session.append(AudioSamples(np.arange(150_000, dtype=np.float32), 16_000))
        await session.commit()
    pieces = [event.append.part.audio.samples for event in orchestrator.events[0] if event.HasField("append")]
    assert [piece.shape[0] for piece in pieces] == [65_536, 65_536, 18_928]
    assert b"".join(piece.inline for piece in pieces) == np.arange(150_000, dtype=np.float32).tobytes()


async def test_an_append_waits_for_credit(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([opened(limit=4), "append", granted(9, accepted=1), *ANSWER, "close"])
    async with client.converse() as session:
        await session.append("1234")
        await asyncio.wait_for(session.append("56789"), 5)
        await session.commit()
    assert texts(orchestrator.events[0]) == ["1234", "56789"]


async def test_an_append_above_the_credit_is_not_sent(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([opened(limit=4), "close"])
    async with client.converse() as session:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.append("12345"), 0.2)
    assert kinds(orchestrator.events[0]) == ["open", "close"]


async def test_a_rejected_commit_raises_its_error(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    empty = NotReadyError("turn 1 has no input", reason="EMPTY_TURN")
    async with _conversation(orchestrator, client, "commit", rejected(1, empty), *ANSWER) as session:
        with pytest.raises(NotReadyError, match="turn 1 has no input") as failure:
            await session.commit()
        await session.append("hello")
        assert await session.commit() == 1
    assert failure.value.reason == "EMPTY_TURN"


async def test_a_rejected_piece_fails_the_next_call(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    wrong = UnsupportedError("no edge carries images")
    async with _conversation(orchestrator, client, "append", rejected(1, wrong), "commit", committed(1)) as session:
        await session.append(ImageFile(b"png", "image/png"))
        with pytest.raises(UnsupportedError, match="no edge carries images"):
            await session.commit()


async def test_a_rejected_piece_returns_its_credit(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    large = OverloadedError("too large", reason="SESSION_TOO_LARGE")
    orchestrator.talks.append([opened(limit=4), "append", rejected(1, large), "append", *ANSWER, "close"])
    async with client.converse() as session:
        await session.append("1234")
        with pytest.raises(OverloadedError):
            await asyncio.wait_for(session.append("5678"), 5)
        await session.append("5678")
        await session.commit()


async def test_nothing_of_an_interrupted_turn_follows(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    late: Talk = [text(1, "late", position=6)] * 3
    stop: Talk = [interrupted(1, text=6), *late, turn_ended(1, "Hi you")]
    async with _conversation(orchestrator, client, *ANSWER[:5], "interrupt", *stop) as session:
        await _commit(session, "hello")
        stopped = await session.interrupt()
        events = await _answer(session)
    assert stopped == TurnInterrupted(1, detected=False, positions={"text": 6})
    assert [type(event) for event in events] == [SessionOpened, TurnCommitted, TurnInterrupted, TurnEnded]
    assert orchestrator.events[0][3].interrupt.turn == 1


async def test_an_interruption_of_an_ended_turn_is_an_error(
    orchestrator: ScriptedOrchestrator, client: AsyncClient
) -> None:
    ended = NotReadyError("turn 1 has ended", reason="TURN_ENDED")
    async with _conversation(orchestrator, client, *ANSWER, "interrupt", rejected(3, ended)) as session:
        await _commit(session, "hello")
        with pytest.raises(NotReadyError, match="turn 1 has ended"):
            await session.interrupt()


async def test_a_truncation_names_what_was_heard(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    confirmed: Talk = [truncated(1, "Hi"), "truncate", truncated(1, "H")]
    async with _conversation(orchestrator, client, *ANSWER, "truncate", *confirmed) as session:
        await _commit(session, "hello")
        async for event in session.answer():
            if isinstance(event, Text):
                break
        assert (await session.truncate()).answer == "Hi"
        await _answer(session)
        assert (await session.truncate(audio_s=1 / 24_000)).answer == "H"
    sent = [event.truncate for event in orchestrator.events[0] if event.HasField("truncate")]
    assert [(each.turn, [(at.name, at.position) for at in each.positions]) for each in sent] == [
        (1, [("text", 3)]),
        (1, [("audio", 1)]),
    ]


async def test_a_truncation_waits_for_the_end_of_the_turn(
    orchestrator: ScriptedOrchestrator, client: AsyncClient
) -> None:
    stop: Talk = ["interrupt", interrupted(1, text=6), "append", turn_ended(1, "Hi you")]
    async with _conversation(orchestrator, client, *ANSWER[:5], *stop, "truncate", truncated(1, "Hi")) as session:
        await _commit(session, "hello")
        await session.interrupt()
        truncating = asyncio.create_task(session.truncate(positions={"text": 2}))
        await session.append("more")
        assert (await truncating).answer == "Hi"


async def test_audio_cannot_be_truncated_without_audio(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    async with _conversation(orchestrator, client, *ANSWER[:2], turn_ended(1)) as session:
        await _commit(session, "hello")
        with pytest.raises(NotFoundError, match="produced no audio"):
            await session.truncate(audio_s=1.0)


async def test_a_clear_withdraws_the_input(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    async with _conversation(orchestrator, client, "clear", granted(accepted=2), *ANSWER) as session:
        await session.append("no")
        await session.clear()
        await session.append("yes")
        await session.commit()
    assert kinds(orchestrator.events[0]) == ["open", "append", "clear", "append", "commit", "close"]


async def test_cleared_streamed_input_ends_its_turn(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    cleared: Talk = [interrupted(1), turn_ended(1), granted(accepted=2)]
    script: Talk = ["append", text(1, "wrong"), "clear", text(1, "late", position=5), *cleared]
    async with _conversation(
        orchestrator, client, *script, "commit", committed(2), text(2, "right"), turn_ended(2), input_mode="stream"
    ) as session:
        await session.append("no")
        await session.clear()
        await session.append("yes")
        assert await session.commit() == 2
        assert _text_of(await _answer(session)) == "right"


async def test_a_failed_turn_raises_after_its_events(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    failed = turn_ended(1, "Hi ", InternalError("the stage failed"))
    again: Talk = ["commit", committed(2), text(2, "ok"), turn_ended(2, "ok")]
    async with _conversation(orchestrator, client, *ANSWER[:4], failed, *again) as session:
        await _commit(session, "hello")
        events = list[SessionEvent]()
        with pytest.raises(InternalError, match="the stage failed"):
            async for event in session.answer():
                events.append(event)
        await _commit(session, "again")
        assert _text_of(await _answer(session)) == "ok"
    assert isinstance(events[-1], TurnEnded)


async def test_detected_turns_and_speech_are_events(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    detected: Talk = [
        speech(1, begins=True, at_s=0.25),
        speech(1, begins=False, at_s=0.5),
        committed(1, audio_end_s=0.75),
    ]
    async with _conversation(
        orchestrator, client, "append", *detected, text(1, "Hi"), turn_ended(1, "Hi"), turn_detection={}
    ) as session:
        await session.append(AudioSamples(np.zeros(16_000, np.float32), 16_000))
        events = list[SessionEvent]()
        async for event in session:
            events.append(event)
            if isinstance(event, TurnEnded):
                break
    assert [getattr(event, "at_s", None) for event in events[1:3]] == [0.25, 0.5]
    assert events[3] == TurnCommitted(1, detected=True, audio_end_s=0.75)


async def test_the_iteration_ends_when_the_session_is_closed(
    orchestrator: ScriptedOrchestrator, client: AsyncClient
) -> None:
    async with _conversation(orchestrator, client) as session:
        reading = asyncio.create_task(_all(session))
    assert [type(event) for event in await reading] == [SessionOpened]
    with pytest.raises(NotReadyError, match="was closed") as failure:
        await session.append("late")
    assert failure.value.reason == "SESSION_CLOSED"


async def _all(session: AsyncSession) -> list[SessionEvent]:
    return [event async for event in session]


async def test_a_session_is_opened_once(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    async with _conversation(orchestrator, client) as session:
        pass
    with pytest.raises(RuntimeError, match="call `converse` again"):
        async with session:
            pass


async def test_closing_drops_what_waits_for_credit(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([opened(limit=1), "close"])
    async with client.converse() as session:
        appending = asyncio.create_task(session.append("waits"))
        await asyncio.sleep(0)
    with pytest.raises(NotReadyError, match="was closed"):
        await appending
    assert numbered(orchestrator.events[0]) == {1: "close"}


async def test_closing_the_client_closes_its_sessions(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([opened(), "close"])
    await client.converse().__aenter__()
    await client.close()
    assert kinds(orchestrator.events[0]) == ["open", "close"]


async def test_an_error_of_the_session_ends_it(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    wrong = InvalidRequestError("event 3 follows event 1", reason="EVENT_GAP")
    # The error follows the last event: grpc.aio replaces the status of a call that ends while an event is written.
    orchestrator.talks.append([opened(), "append", "commit", wrong])
    async with client.converse() as session:
        await session.append("hello")
        with pytest.raises(InvalidRequestError, match="event 3 follows event 1"):
            await session.commit()
        with pytest.raises(InvalidRequestError):
            await _all(session)


async def test_a_session_that_cannot_be_opened_raises(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([UnsupportedError("no stage detects turns")])
    with pytest.raises(UnsupportedError, match="no stage detects turns"):
        async with client.converse(turn_detection={}):
            pass
    assert not client.sessions


async def test_a_full_orchestrator_is_asked_again(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    full = OverloadedError("full", reason="SESSION_LIMIT", retry_after_s=0.01)
    orchestrator.talks.extend([["open", full], ["open", full], ["open", opened(), "close"]])
    async with client.converse():
        assert [call[0].open.earlier_calls for call in orchestrator.events] == [0, 0, 0]


async def test_a_session_of_another_client_is_not_taken_over(
    orchestrator: ScriptedOrchestrator, client: AsyncClient
) -> None:
    orchestrator.talks.append([opened(known=True, accepted=5)])
    with pytest.raises(ExistsError, match="another client"):
        async with client.converse(session_id="s"):
            pass


async def test_an_unknown_kind_closes_the_session(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    unknown = ConverseResponse.FromString(b"\xa2\x06\x00")  # field 100
    ignorable = ConverseResponse.FromString(b"\xa2\x06\x00\x78\x01")
    async with _conversation(orchestrator, client, ignorable, "append", unknown) as session:
        await session.append("hello")
        with pytest.raises(UnsupportedError, match="unknown kind"):
            await _all(session)
    assert kinds(orchestrator.events[0]) == ["open", "append", "close"]


async def test_an_idle_reader_receives_a_bounded_number_of_events(
    orchestrator: ScriptedOrchestrator, client: AsyncClient
) -> None:
    letters = [text(1, "a", position=index) for index in range(4000)]
    async with _conversation(orchestrator, client, *ANSWER[:2], *letters, turn_ended(1, "a" * 4000)) as session:
        await _commit(session, "hello")
        async with asyncio.timeout(10):
            while session._state.may_read:
                await asyncio.sleep(0)
        assert len(session._state.deliveries) < 100
        assert _text_of(await _answer(session)) == "a" * 4000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_mode": "speech"}, "use one of prompt, stream"),
        ({"speed": 2}, "unknown argument: speed"),
        ({"seed": -1}, "cannot be sent"),
        ({"json_schema": "{}", "regex": "a"}, "only one structure"),
    ],
)
async def test_wrong_arguments_are_rejected(client: AsyncClient, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        client.converse(**arguments)  # type: ignore[arg-type]
