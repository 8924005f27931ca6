"""Sessions of the client with real processes: what the pipeline receives is what the client said and heard."""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from stagemesh.client import AsyncClient, AsyncSession, AudioChunk, Client, Session, Text, TurnEnded
from stagemesh.common.errors import NotReadyError
from tests.deployment import Deployment, deployed_for_module, eventually
from tests.system.breakable_relay import breakable_relay
from tests.system.conversing import ExpectedConversation, joined, sound_of, talking

STEPS = 20


up = deployed_for_module(lambda folder: talking(folder, steps=STEPS, park_s=1.0))


@pytest.fixture
def expected() -> ExpectedConversation:
    return ExpectedConversation(7, steps=STEPS)


def _say(session: Session, line: str, at: "dict[int, Callable[[], None]] | None" = None) -> str:
    """Says a line, and calls a function once a number of texts has arrived. Returns the text of the answer."""
    session.append(line)
    session.commit()
    heard, actions = list[str](), dict(at or {})
    for event in session.answer():
        if isinstance(event, Text):
            heard.append(event.delta)
            actions.pop(len(heard), lambda: None)()
    assert not actions, "something was not done"
    return "".join(heard)


def _check_turn(
    session: Session, line: str, expected: ExpectedConversation, at: "dict[int, Callable[[], None]] | None" = None
) -> None:
    """Says a line as `_say` does. Checks the answer, and adds both to the expected conversation."""
    answer = _say(session, line, at)
    assert answer == expected.answer(line)
    expected.add(line, heard=answer)


def test_each_turn_continues_the_conversation(up: Deployment, expected: ExpectedConversation) -> None:
    with up.client() as client, client.converse(seed=7, outputs=["text"]) as session:
        for line in ("one", "two", "three"):
            _check_turn(session, line, expected)


def test_an_opening_conversation_precedes_the_first_turn(up: Deployment, expected: ExpectedConversation) -> None:
    expected.add("hello", heard="hi")
    with up.client() as client, client.converse(seed=8, messages=[("user", "hello"), ("assistant", "hi")]) as session:
        assert _say(session, "one") == expected.answer("one")


async def test_an_interrupted_answer_is_cut_to_what_was_heard(up: Deployment, expected: ExpectedConversation) -> None:
    async with AsyncClient(up.endpoint) as client, client.converse(seed=7) as session:
        await session.append("one")
        turn = await session.commit()
        heard = ""
        async for event in session.answer():
            heard += event.delta if isinstance(event, Text) else ""
            if len(heard) > 100:
                break
        await session.interrupt()
        assert not [event async for event in session.answer() if isinstance(event, Text | AudioChunk)]
        assert (await session.truncate(turn, positions={"text": len(heard.encode())})).answer == heard
        expected.add("one", heard=heard)
        await session.append("two")
        await session.commit()
        texts = [event.delta async for event in session.answer() if isinstance(event, Text)]
        assert "".join(texts) == expected.answer("two")
    eventually(up.idle, timeout_s=10)


def test_a_broken_connection_changes_nothing(up: Deployment, expected: ExpectedConversation) -> None:
    with breakable_relay(up.endpoint) as way, Client(way.endpoint) as client, client.converse(seed=7) as session:
        for line, cuts in (("one", (3, 4, 15)), ("two", (1, 20)), ("three", ())):
            _check_turn(session, line, expected, dict.fromkeys(cuts, way.cut))
            way.cut()
    eventually(up.idle, timeout_s=10)


def test_a_killed_stage_changes_nothing(up: Deployment, expected: ExpectedConversation) -> None:
    with up.client() as client, client.converse(seed=7) as session:
        for line, stage in (("one", "source-0"), ("two", "frames-0"), ("three", "sound-0")):
            _check_turn(session, line, expected, {10: partial(up.kill, stage)})
    up.wait(Deployment.all_ready)


def test_a_restarted_orchestrator_continues_from_the_transcript(up: Deployment, expected: ExpectedConversation) -> None:
    with up.client() as client, client.converse(seed=7) as session:
        expected.add("one", heard=_say(session, "one"))
        _check_turn(session, "two", expected, {10: lambda: up.kill("orchestrator")})
        up.kill("orchestrator")
        assert _say(session, "three") == expected.answer("three")
    eventually(up.idle, timeout_s=10)


def test_a_parked_session_continues(up: Deployment, expected: ExpectedConversation) -> None:
    with up.client() as client, client.converse(seed=7) as session:
        expected.add("one", heard=_say(session, "one"))
        with session._changed:
            assert session._changed.wait_for(lambda: not session._state.log.is_attached, timeout=10)
        assert _say(session, "two") == expected.answer("two")


async def test_streamed_text_is_spoken_before_the_commit(up: Deployment) -> None:
    first, second = "The first sentence is long enough for a chunk. ", "Another one."
    async with AsyncClient(up.endpoint) as client, client.converse(input_mode="stream") as session:
        assert session.opened.outputs == ("audio",)
        await session.append(first)
        chunks = [await _next_audio(session)]
        await session.append(second)
        await session.commit()
        chunks += [event.samples async for event in session.answer() if isinstance(event, AudioChunk)]
    np.testing.assert_array_equal(joined(chunks), sound_of(first + second))


async def _next_audio(session: AsyncSession) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    async with asyncio.timeout(20):
        async for event in session:
            if isinstance(event, AudioChunk):
                return event.samples
    raise AssertionError("the session ended")


async def test_streamed_input_survives_a_broken_connection_and_a_killed_orchestrator(up: Deployment) -> None:
    words = [f"word {number} and some more. " for number in range(40)]
    with breakable_relay(up.endpoint) as way:
        async with AsyncClient(way.endpoint) as client, client.converse(input_mode="stream") as session:
            for number, word in enumerate(words):
                await session.append(word)
                await asyncio.sleep(0.02)
                {10: way.cut, 20: lambda: up.kill("orchestrator"), 30: way.cut}.get(number, lambda: None)()
            await session.commit()
            chunks = [event.samples async for event in session.answer() if isinstance(event, AudioChunk)]
    np.testing.assert_array_equal(joined(chunks), sound_of("".join(words)))
    eventually(up.idle, timeout_s=10)


async def test_cleared_input_is_not_answered(up: Deployment, expected: ExpectedConversation) -> None:
    async with AsyncClient(up.endpoint) as client, client.converse(seed=7) as session:
        await session.append("nonsense")
        await session.clear()
        with pytest.raises(NotReadyError, match="has no input"):
            await session.commit()
        await session.append("one")
        await session.commit()
        texts = [event.delta async for event in session.answer() if isinstance(event, Text)]
    assert "".join(texts) == expected.answer("one")


async def test_input_beyond_the_credit_waits_for_the_stages(up: Deployment) -> None:
    text = "All work and no play. " * 60_000
    async with AsyncClient(up.endpoint) as client, client.converse(input_mode="stream") as session:
        reading = asyncio.create_task(_samples(session))
        for begin in range(0, len(text), 100_000):
            await session.append(text[begin : begin + 100_000])
        await session.commit()
        np.testing.assert_array_equal(await reading, sound_of(text))


async def _samples(session: AsyncSession) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    chunks = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]()
    async for event in session:
        if isinstance(event, AudioChunk):
            chunks.append(event.samples)
        elif isinstance(event, TurnEnded):
            break
    return joined(chunks)
