"""Sessions of the clients in Python: their arguments, how they end, and what only these clients promise."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from stagemesh.client import AsyncClient, AudioSamples, RetryPolicy
from stagemesh.common.errors import InvalidRequestError, NotReadyError, OverloadedError, UnavailableError
from stagemesh.conformance.replicas import until
from stagemesh.v1 import orchestrator_pb2
from tests.client.scripted import Pause, ScriptedOrchestrator, Talk
from tests.client.scripted_sessions import (
    committed,
    interrupted,
    kinds,
    numbered,
    opened,
    rejected,
    text,
    texts,
    truncated,
    turn_ended,
)
from tests.client.session_drivers import QUICK, asynchronous, synchronous
from tests.rpc.call_errors import raises

FIRST_TURN: Talk = ["commit", committed(1), text(1, "Hi"), turn_ended(1, "Hi")]


@pytest.fixture
async def client(orchestrator: ScriptedOrchestrator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(orchestrator.endpoint, retry_policy=QUICK) as made:
        yield made


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


async def test_an_append_above_the_credit_is_not_sent(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([opened(limit=4), "close"])
    async with client.converse() as session:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.append("12345"), 0.2)
    assert kinds(orchestrator.events[0]) == ["open", "close"]


async def test_a_truncation_waits_for_its_turns_end(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    stop: Talk = ["interrupt", interrupted(1, text=2), "append", turn_ended(1, "Hi"), "truncate", truncated(1, "H")]
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], *stop, "close"])
    async with client.converse() as session:
        await session.append("hello")
        await session.commit()
        await session.interrupt()
        truncating = asyncio.create_task(session.truncate(positions={"text": 1}))
        await session.append("more")
        assert (await truncating).answer == "H"


async def test_the_iteration_ends_when_the_session_is_closed(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), "close"])
    async with asynchronous(orchestrator) as talk:
        reading = asyncio.create_task(talk.read("ended"))
    await reading
    assert talk.kinds == ["opened"]
    with raises(NotReadyError, reason="SESSION_CLOSED", match="was closed"):
        await talk.append("late")


async def test_a_session_is_opened_once(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    orchestrator.talks.append([opened(), "close"])
    async with client.converse() as session:
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


async def test_a_full_orchestrator_is_asked_again(orchestrator: ScriptedOrchestrator, client: AsyncClient) -> None:
    full = OverloadedError("full", reason="SESSION_LIMIT", retry_after_s=0.01)
    orchestrator.talks.extend([["open", full], ["open", full], ["open", opened(), "close"]])
    async with client.converse():
        assert [call[0].open.earlier_calls for call in orchestrator.events] == [0, 0, 0]


async def test_an_idle_reader_receives_a_bounded_number_of_events(orchestrator: ScriptedOrchestrator) -> None:
    letters = [text(1, "a", position=index) for index in range(4000)]
    orchestrator.talks.append([opened(), *FIRST_TURN[:2], *letters, turn_ended(1, "a" * 4000), "close"])
    async with asynchronous(orchestrator) as talk:
        await talk.ask("hello")
        await until(lambda: not talk.session._state.may_read, timeout_s=10)
        assert len(talk.session._state.deliveries) < 100
        assert await talk.answer() == "a" * 4000


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


async def test_rejected_pieces_are_not_restored(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    wrong = rejected(1, NotReadyError("no", reason="TURN_RUNNING"))
    orchestrator.talks.append([opened(), "append", wrong, "append", Pause.BREAK])
    other.talks.append([opened(), rejected(1, NotReadyError("empty")), *FIRST_TURN, "close"])
    async with asynchronous(orchestrator, other) as talk:
        await talk.append("wrong")
        await until(lambda: talk.session._state.piece_error is not None, timeout_s=5)
        with pytest.raises(NotReadyError, match="no"):
            await talk.commit()
        assert await talk.ask("right") == 1
    assert texts(other.events[0]) == ["right"]


async def test_a_rejected_piece_returns_its_credit(orchestrator: ScriptedOrchestrator) -> None:
    large = OverloadedError("too large", reason="SESSION_TOO_LARGE")
    orchestrator.talks.append([opened(limit=4), "append", rejected(1, large), "append", *FIRST_TURN, "close"])
    async with asynchronous(orchestrator) as talk:
        await talk.append("1234")
        with pytest.raises(OverloadedError):
            await asyncio.wait_for(talk.append("5678"), 5)
        await talk.ask("5678")


async def test_a_repeated_text_is_dropped(orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], Pause.BREAK])
    other.talks.append([opened(), *FIRST_TURN[:3], text(1, "!", position=2), turn_ended(1, "Hi!"), "close"])
    async with asynchronous(orchestrator, other) as talk:
        assert await talk.say("hello") == "Hi!"


async def test_turns_that_are_only_detected_are_restored_without_their_audio(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    detected: Talk = [committed(1, audio_end_s=1.0), turn_ended(1)]
    orchestrator.talks.append([opened(), "append", *detected, "append", Pause.BREAK])
    other.talks.append([opened(), "append", committed(2, audio_end_s=1.0), turn_ended(2), "close"])
    async with asynchronous(orchestrator, other, turn_detection={"detects_only": True}) as talk:
        for _ in range(2):
            await talk.append(AudioSamples(np.ones(8_000, np.float32), 8_000))
        await talk.read("ended", 2)
    restored = [event.restore for event in other.events[0] if event.HasField("restore")]
    assert [(each.turn, len(each.messages), each.ByteSize() < 16) for each in restored] == [(1, 1, True)]


@pytest.mark.parametrize("reattach_s", [0.0, 0.5])
async def test_the_search_for_a_lost_session_is_bounded(orchestrator: ScriptedOrchestrator, reattach_s: float) -> None:
    orchestrator.talks.extend([[opened(), "append", Pause.BREAK], [Pause.BREAK]])
    policy = RetryPolicy(first_pause_s=0.01, reattach_s=reattach_s)
    async with AsyncClient(orchestrator.endpoint, retry_policy=policy) as client, client.converse() as session:
        await session.append("hello")
        with pytest.raises(UnavailableError, match=r"Socket closed|the call ended"):
            await session.commit()
    assert len(orchestrator.events) > 3 if reattach_s else len(orchestrator.events) == 1


async def test_threads_share_a_session(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), *FIRST_TURN, "close"])
    async with synchronous(orchestrator) as talk:
        reading = asyncio.create_task(talk.read("closed"))
        await talk.ask("hello")
        await asyncio.to_thread(talk.session.close)
        await asyncio.wait_for(reading, 5)
        with pytest.raises(NotReadyError, match="was closed"):
            await talk.append("late")
    assert talk.kinds[-1] == "ended"


async def test_an_orchestrator_that_does_not_answer_a_close_is_left(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), "close", Pause.FOREVER])
    async with asyncio.timeout(5), synchronous(orchestrator):
        pass
    await asyncio.wait_for(orchestrator.hung_up.wait(), 5)
