"""Sessions of the synchronous client. `SessionState` is tested by those of the asynchronous client."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from stagemesh.client import Client, RetryPolicy, Session, SessionEvent, Text, TurnEnded
from stagemesh.common.errors import NotReadyError, UnavailableError, UnsupportedError
from stagemesh.v1.orchestrator_pb2 import ConverseResponse
from tests.client.scripted import Pause, ScriptedOrchestrator, Talk
from tests.client.scripted_sessions import (
    committed,
    granted,
    interrupted,
    kinds,
    numbered,
    opened,
    text,
    texts,
    truncated,
    turn_ended,
)

QUICK = RetryPolicy(attempts=3, first_pause_s=0.01, max_pause_s=0.1, reattach_s=5)
PARKED = UnavailableError("idle", reason="SESSION_PARKED")
FIRST_TURN: Talk = ["commit", committed(1), text(1, "Hi"), turn_ended(1, "Hi")]


async def _converse(talk: Callable[[Session], None], *orchestrators: ScriptedOrchestrator) -> None:
    def run() -> None:
        endpoints = [each.endpoint for each in orchestrators]
        with Client(*endpoints, retry_policy=QUICK) as client, client.converse() as session:
            talk(session)

    await asyncio.to_thread(run)


def _say(session: Session, line: str) -> str:
    session.append(line)
    session.commit()
    return "".join(event.delta for event in session.answer() if isinstance(event, Text))


async def test_a_turn_is_answered(orchestrator: ScriptedOrchestrator) -> None:
    answers = list[str]()
    orchestrator.talks.append([opened(), *FIRST_TURN, "close"])
    await _converse(lambda session: answers.append(_say(session, "hello")), orchestrator)
    assert answers == ["Hi"]
    assert numbered(orchestrator.events[0]) == {1: "append", 2: "commit", 3: "close"}


async def test_an_interruption_and_a_truncation_are_confirmed(orchestrator: ScriptedOrchestrator) -> None:
    def talk(session: Session) -> None:
        session.append("hello")
        session.commit()
        assert session.interrupt().positions == {"text": 2}
        assert not [event for event in session.answer() if isinstance(event, Text)]
        assert session.truncate(positions={"text": 1}).answer == "H"

    stop: Talk = ["interrupt", interrupted(1, text=2), turn_ended(1, "Hi"), "truncate", truncated(1, "H")]
    orchestrator.talks.append([opened(), *FIRST_TURN[:3], *stop, "close"])
    await _converse(talk, orchestrator)


async def test_an_append_waits_for_credit(orchestrator: ScriptedOrchestrator) -> None:
    def talk(session: Session) -> None:
        session.append("1234")
        session.append("5678")
        session.clear()
        _say(session, "90")

    orchestrator.talks.append(
        [opened(limit=4), "append", granted(8), "clear", granted(10, accepted=3), *FIRST_TURN, "close"]
    )
    await _converse(talk, orchestrator)
    assert texts(orchestrator.events[0]) == ["1234", "5678", "90"]


async def test_a_lost_session_continues_at_another_orchestrator(
    orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator
) -> None:
    answers = list[str]()

    def talk(session: Session) -> None:
        answers.extend(_say(session, line) for line in ("one", "two"))

    orchestrator.talks.append([opened(), *FIRST_TURN, "commit", committed(2), text(2, "Y"), Pause.BREAK])
    rest: Talk = ["commit", committed(2), text(2, "o", position=1), turn_ended(2, "Yo")]
    other.talks.append([opened(), *rest, "close"])
    await _converse(talk, orchestrator, other)
    assert answers == ["Hi", "Yo"]
    assert kinds(other.events[0]) == ["open", "restore", "append", "commit", "close"]


async def test_a_parked_session_calls_again_with_its_next_event(orchestrator: ScriptedOrchestrator) -> None:
    answers = list[str]()

    def talk(session: Session) -> None:
        answers.append(_say(session, "one"))
        with session._changed:
            assert session._changed.wait_for(lambda: not session._state.log.is_attached, timeout=5)
        assert len(orchestrator.events) == 1
        answers.append(_say(session, "two"))

    again: Talk = [
        opened(known=True, accepted=2, turn=2),
        "commit",
        committed(2),
        text(2, "Yo"),
        turn_ended(2),
        "close",
    ]
    orchestrator.talks.extend([[opened(), *FIRST_TURN, PARKED], again])
    await _converse(talk, orchestrator)
    assert answers == ["Hi", "Yo"]


async def test_threads_share_a_session(orchestrator: ScriptedOrchestrator) -> None:
    events = list[SessionEvent]()

    def talk(session: Session) -> None:
        reading = threading.Thread(target=lambda: events.extend(session))
        reading.start()
        session.append("hello")
        session.commit()
        session.close()
        reading.join(5)
        with pytest.raises(NotReadyError, match="was closed"):
            session.append("late")

    orchestrator.talks.append([opened(), *FIRST_TURN, "close"])
    await _converse(talk, orchestrator)
    assert isinstance(events[-1], TurnEnded)


async def test_a_session_that_cannot_be_opened_raises(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([UnsupportedError("no stage detects turns")])
    with pytest.raises(UnsupportedError, match="no stage detects turns"):
        await _converse(lambda session: None, orchestrator)


async def test_an_unknown_kind_closes_the_session(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), ConverseResponse.FromString(b"\xa2\x06\x00"), "close"])
    with pytest.raises(UnsupportedError, match="unknown kind"):
        await _converse(lambda session: list(session).clear(), orchestrator)
    assert kinds(orchestrator.events[0]) == ["open", "close"]


async def test_an_orchestrator_that_does_not_answer_a_close_is_left(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.talks.append([opened(), "close", Pause.FOREVER])
    await asyncio.wait_for(_converse(lambda session: None, orchestrator), 5)
    await asyncio.wait_for(orchestrator.hung_up.wait(), 5)
