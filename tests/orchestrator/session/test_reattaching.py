"""A client whose connection broke attaches to its session again, or to another orchestrator."""

from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import ExistsError, StagemeshError
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.mesh import mesh
from tests.orchestrator.scripted_stage import hang
from tests.orchestrator.session.fake_runner import chatting, settle
from tests.orchestrator.session.scripts import ECHO, Steered
from tests.orchestrator.session.talk import Talk, talking


def positions(text: int) -> list[orchestrator_pb2.OutputPosition]:
    """Returns the position of a client that has this number of characters."""
    return [orchestrator_pb2.OutputPosition(name="text", position=text)]


async def test_an_answer_continues_after_the_clients_position(tmp_path: Path) -> None:
    script = Steered()
    async with mesh(tmp_path, ECHO, scripts={"a": script}) as echo:
        async with talking(echo.stub, session_id="s", linger_s=30) as talk:
            await talk.say("one")
            await talk.commit()
            script.emit("some ")
            await talk.output("some ")
        fields = {"linger_s": 30, "earlier_calls": 1, "turn": 1, "next_positions": positions(2)}
        async with talking(echo.stub, session_id="s", seq=2, **fields) as again:
            script.emit("words")
            script.finish()
            ended = (await again.next("ended")).ended
        assert len(echo.stages["a"].requests) == 1
    opened = again.received[0].opened
    assert (opened.is_known, opened.accepted_seq, opened.turn, opened.running_turn) == (True, 2, 2, 1)
    assert (again.texts(1, "text"), ended.answer) == ("me words", "some words")


async def test_events_that_were_handled_are_ignored_when_they_are_repeated(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("one ")
        await chat.leave()
        chat.attach(is_known=True)
        chat.seq = 0
        chat.say("one ")
        chat.say("two")
        chat.send(commit={})
        assert chat.prompt(1) == ["one two"]


async def test_a_turn_that_ended_meanwhile_is_sent_from_the_clients_position(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("one")
        chat.send(commit={})
        await settle()
        await chat.leave()
        chat.request(1).emit("answer")
        chat.request(1).end()
        await settle()
        chat.received.clear()
        chat.attach(is_known=True, turn=1, next_positions=positions(3))
        await settle()
        assert (chat.text(1), chat.kinds(1)) == ("wer", ["committed", "ended"])
        chat.say("two")
        chat.send(commit={})
        assert chat.prompt(2) == ["one", "answer", "two"]


async def test_the_end_of_a_turn_is_repeated_if_it_was_lost(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("one")
        chat.send(commit={})
        chat.request(1).emit("answer")
        chat.request(1).end()
        await settle()
        await chat.leave()
        chat.received.clear()
        chat.attach(is_known=True, turn=1, next_positions=positions(6))
        await settle()
    assert (chat.text(1), chat.kinds(1)) == ("", ["committed", "ended"])


async def test_a_client_that_returns_too_late_for_the_outputs_receives_an_error(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("one")
        chat.send(commit={})
        chat.request(1).emit("answer")
        chat.request(1).end()
        await settle()
        await chat.leave()
        chat.runner.requests.clear()
        chat.attach(is_known=True, turn=1)
        await settle()
    ended = chat.last("ended").ended
    assert (ended.error.reason, ended.answer) == ("UNKNOWN_REQUEST", "answer")


async def test_outputs_of_an_interrupted_turn_are_not_sent_again(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("one")
        chat.send(commit={})
        chat.request(1).emit("answer")
        await settle()
        chat.send(interrupt={})
        await settle()
        await chat.leave()
        chat.received.clear()
        chat.attach(is_known=True, turn=1)
        await settle()
    assert (chat.text(1), chat.kinds(1)) == ("", ["committed", "interrupted", "ended"])


async def test_rejections_are_repeated(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.send(commit={})
        await chat.leave()
        chat.received.clear()
        chat.attach(is_known=True)
        await settle()
    assert chat.rejected == "EMPTY_TURN"


async def test_a_turn_is_stopped_if_the_client_does_not_return(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, scripts={"a": hang}) as echo:
        async with talking(echo.stub, session_id="s") as talk:
            await talk.say("one")
            await talk.commit()
            await talk.output("a ")
        await echo.until_idle()
        async with talking(echo.stub, session_id="s", earlier_calls=1) as again:
            assert not again.received[0].opened.is_known


async def test_a_lingering_turn_is_stopped_after_its_time(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, scripts={"a": hang}) as echo:
        async with talking(echo.stub, session_id="s", linger_s=1) as talk:
            await talk.say("one")
            await talk.commit()
            await talk.output("a ")
        assert (await echo.describe()).in_flight == 1
        await echo.until_idle()


async def test_a_session_continues_at_another_orchestrator(tmp_path: Path) -> None:
    script = Steered()
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    async with mesh(tmp_path / "first", ECHO) as first, talking(first.stub, session_id="s") as talk:
        seed = talk.received[0].opened.seed
        await talk.turn("one")
    async with mesh(tmp_path / "second", ECHO, scripts={"a": script}) as second:
        fields = {"earlier_calls": 1, "turn": 2, "next_positions": positions(2), "parameters": {"seed": seed}}
        async with talking(second.stub, session_id="s", seq=2, **fields) as again:
            messages = [
                request_pb2.Message(role=request_pb2.ROLE_USER, content="one"),
                request_pb2.Message(role=request_pb2.ROLE_ASSISTANT, content="a done"),
            ]
            await again.send(seq=0, restore={"turn": 1, "messages": messages})
            await again.send(seq=3, append={"part": {"text": "two"}})
            await again.commit()
            script.emit("an", "swer")
            script.finish()
            ended = (await again.next("ended")).ended
        step = second.stages["a"].requests[0]
    assert (again.texts(2, "text"), ended.answer) == ("swer", "answer")
    assert [message.content for message in step.input.conversation.messages] == ["one", "a done", "two"]
    assert (step.request_id, step.seed, step.attempt) == ("s.2", seed + 1, 1001)


async def test_a_later_call_replaces_the_attached_one(tmp_path: Path) -> None:
    async with (
        mesh(tmp_path, ECHO) as echo,
        talking(echo.stub, session_id="s") as talk,
        talking(echo.stub, session_id="s", earlier_calls=1) as again,
    ):
        error = await talk.failure()
        assert error.reason == "SESSION_REPLACED"
        assert await again.turn("one") == "a done"


@pytest.mark.parametrize("fields", [{"outputs": ["text"]}, {"parameters": {"seed": 1}}, {"caller": "other"}])
async def test_a_session_with_other_content_is_rejected(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with mesh(tmp_path, ECHO) as echo, talking(echo.stub, session_id="s", parameters={"seed": 7}):
        other = Talk(echo.stub)
        await other.call.write(
            orchestrator_pb2.ConverseRequest(
                open=orchestrator_pb2.SessionOpen(**{"session_id": "s", "parameters": {"seed": 7}, **fields})
            )
        )
        error: StagemeshError = await other.failure()
    assert isinstance(error, ExistsError)
    assert error.reason == "SESSION_EXISTS"
