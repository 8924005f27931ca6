"""Sessions over gRPC, with scripted stages, and clients that attach to them again after their connection broke."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import ExistsError, InvalidRequestError, UnavailableError
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.mesh import Mesh, ask, mesh
from tests.orchestrator.scripted_stage import failing, say_hello
from tests.orchestrator.session.fake_runner import Chat, settle
from tests.orchestrator.session.scripts import ECHO, Steered
from tests.orchestrator.session.talk import Talk, talking


async def test_turns_are_requests_whose_prompts_contain_the_transcript(chain: Mesh) -> None:
    opening = request_pb2.Conversation(messages=[request_pb2.Message(role=request_pb2.ROLE_SYSTEM, content="be brief")])
    async with talking(chain.stub, session_id="s", conversation=opening) as talk:
        assert [await talk.turn(text) for text in ("one", "two")] == ["a done", "a done"]
    assert (talk.kinds(1), talk.text(1, "last")) == (["committed", "ended"], "c done")
    seed, steps = talk.received[0].opened.seed, chain.stages["a"].requests
    assert [(step.request_id, step.seed) for step in steps] == [("s.1", seed), ("s.2", seed + 1)]
    prompt = [message.content for message in steps[1].input.conversation.messages]
    assert prompt == ["be brief", "one", "a done", "two"]


async def test_the_text_of_the_answer_is_sent_even_if_it_is_not_wanted(chain: Mesh) -> None:
    async with talking(chain.stub, outputs=["last"]) as talk:
        opened = talk.received[0].opened
        assert await talk.turn("hello") == "c done"
    assert (list(opened.outputs), opened.transcript_output) == (["last"], "last")


async def test_nothing_of_an_interrupted_turn_follows_its_interruption(steered: Mesh, script: Steered) -> None:
    async with talking(steered.stub, session_id="s") as talk:
        await talk.commit("one")
        script.emit("some words")
        await talk.output("some words")
        await talk.interrupt()
        interrupted = (await talk.next("interrupted")).interrupted
        script.emit("late")
        ended = (await talk.next("ended")).ended
        await talk.close()
        await talk.rest()
    assert [(each.name, each.position) for each in interrupted.positions] == [("text", 10)]
    assert (ended.answer, ended.HasField("error")) == ("some words", False)
    assert talk.text(1) == "some words"


async def test_a_failed_turn_leaves_the_session_usable(tmp_path: Path) -> None:
    script = failing(InvalidRequestError("not accepted"))
    async with mesh(tmp_path, ECHO, scripts={"a": script}) as echo, talking(echo.stub, session_id="s") as talk:
        await talk.commit("one")
        failed = (await talk.next("ended")).ended
        echo.stages["a"].script = say_hello
        assert await talk.turn("two") == "a done"
        prompt = echo.stages["a"].requests[-1].input.conversation
    assert (failed.error.reason, failed.answer) == ("INVALID_REQUEST", "")
    assert [message.content for message in prompt.messages] == ["one", "", "two"]


async def test_a_turn_that_cannot_start_is_rejected_and_keeps_its_input(echo: Mesh) -> None:
    async with talking(echo.stub, session_id="s") as talk:
        _ = [event async for event in echo.stub.Generate(ask(request_id="s.1"))]
        await talk.commit("one")
        rejected = await talk.rejection()
    assert rejected.error.reason == "REQUEST_EXISTS"
    assert talk.kinds(1) == []


async def test_a_client_that_sends_no_more_receives_the_answer(chain: Mesh) -> None:
    async with talking(chain.stub) as talk:
        await talk.commit("one")
        await talk.call.done_writing()
        await talk.rest()
    assert talk.kinds(1) == ["committed", "ended"]


@pytest.mark.parametrize("event", ["close", "interrupt"])
async def test_a_turn_that_is_closed_or_interrupted_is_stopped_on_its_stages(hanging: Mesh, event: str) -> None:
    async with talking(hanging.stub) as talk:
        await talk.commit("one")
        await talk.output("a ")
        await (talk.close() if event == "close" else talk.interrupt())
        await (talk.rest() if event == "close" else talk.next("ended"))
        await hanging.until_idle()
    assert talk.kinds(1) == ["committed", "interrupted", "ended"]
    assert len(hanging.stages["a"].cancels) == 1


async def test_idle_sessions_park(tmp_path: Path) -> None:
    parked = ECHO + "sessions: {park_s: 0.1}\n"
    async with mesh(tmp_path, parked) as echo, talking(echo.stub, session_id="s", linger_s=30) as talk:
        error = await talk.failure()
        async with talking(echo.stub, session_id="s", linger_s=30, earlier_calls=1) as again:
            assert again.received[0].opened.is_known
    assert (type(error), error.reason) == (UnavailableError, "SESSION_PARKED")


async def test_a_stopping_orchestrator_ends_idle_calls(echo: Mesh) -> None:
    async with talking(echo.stub) as talk:
        await talk.turn("one")
        error, _ = await asyncio.gather(talk.failure(), echo.stop())
    assert error.reason == "NOT_RUNNING"


async def test_a_stopping_orchestrator_lets_a_turn_finish(steered: Mesh, script: Steered) -> None:
    async with talking(steered.stub) as talk:
        await talk.commit("one")
        await talk.next("committed")
        stopping = asyncio.ensure_future(steered.stop())
        script.emit("answer", last=True)
        error = await talk.failure()
        await stopping
    assert (talk.text(1), error.reason) == ("answer", "NOT_RUNNING")
    assert talk.kinds(1) == ["committed", "ended"]


async def test_a_stopping_orchestrator_leaves_a_long_turn_to_others(hanging: Mesh) -> None:
    async with talking(hanging.stub) as talk:
        await talk.commit("one")
        await talk.output("a ")
        error, _ = await asyncio.gather(talk.failure(), hanging.stop())
    assert (talk.kinds(1), error.reason) == (["committed"], "NOT_RUNNING")


# -- clients that return


def positions(text: int) -> list[orchestrator_pb2.OutputPosition]:
    """Returns the position of a client that has this number of characters."""
    return [orchestrator_pb2.OutputPosition(name="text", position=text)]


async def test_an_answer_continues_after_the_clients_position(steered: Mesh, script: Steered) -> None:
    async with talking(steered.stub, session_id="s", linger_s=30) as talk:
        await talk.commit("one")
        script.emit("some ")
        await talk.output("some ")
    fields = {"linger_s": 30, "earlier_calls": 1, "turn": 1, "next_positions": positions(2)}
    async with talking(steered.stub, session_id="s", seq=2, **fields) as again:
        script.emit("words", last=True)
        ended = (await again.next("ended")).ended
    assert len(steered.stages["a"].requests) == 1
    opened = again.received[0].opened
    assert (opened.is_known, opened.accepted_seq, opened.turn, opened.running_turn) == (True, 2, 2, 1)
    assert (again.text(1), ended.answer) == ("me words", "some words")


async def test_events_that_were_handled_are_ignored_when_they_are_repeated(chat: Chat) -> None:
    chat.say("one ")
    await chat.leave()
    chat.attach(is_known=True)
    chat.seq = 0
    chat.say("one ")
    chat.commit("two")
    assert chat.prompt(1) == ["one two"]


async def test_a_turn_that_ended_meanwhile_is_sent_from_the_clients_position(chat: Chat) -> None:
    chat.commit("one")
    await settle()
    await chat.leave()
    await chat.answer(1, "answer")
    for received, rest in ((3, "wer"), (6, "")):
        await chat.reattach(turn=1, next_positions=positions(received))
        assert (chat.text(1), chat.kinds(1)) == (rest, ["committed", "ended"])
    chat.commit("two")
    assert chat.prompt(2) == ["one", "answer", "two"]


async def test_a_client_that_returns_too_late_for_the_outputs_receives_an_error(chat: Chat) -> None:
    await chat.turn(1, "one", "answer")
    await chat.leave()
    chat.runner.requests.clear()
    chat.attach(is_known=True, turn=1)
    await settle()
    ended = chat.last("ended").ended
    assert (ended.error.reason, ended.answer) == ("UNKNOWN_REQUEST", "answer")


async def test_rejections_are_repeated(chat: Chat) -> None:
    chat.commit()
    await chat.leave()
    chat.received.clear()
    chat.attach(is_known=True)
    assert await chat.rejection() == "EMPTY_TURN"


async def test_a_turn_is_stopped_if_the_client_does_not_return(hanging: Mesh) -> None:
    async with talking(hanging.stub, session_id="s") as talk:
        await talk.commit("one")
        await talk.output("a ")
    await hanging.until_idle()
    async with talking(hanging.stub, session_id="s", earlier_calls=1) as again:
        assert not again.received[0].opened.is_known


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
            script.emit("an", "swer", last=True)
            ended = (await again.next("ended")).ended
        step = second.stages["a"].requests[0]
    assert (again.text(2), ended.answer) == ("swer", "answer")
    assert [message.content for message in step.input.conversation.messages] == ["one", "a done", "two"]
    assert (step.request_id, step.seed, step.attempt) == ("s.2", seed + 1, 1001)


async def test_a_later_call_replaces_the_attached_one(echo: Mesh) -> None:
    async with talking(echo.stub, session_id="s") as talk, talking(echo.stub, session_id="s", earlier_calls=1) as again:
        error = await talk.failure()
        assert error.reason == "SESSION_REPLACED"
        assert await again.turn("one") == "a done"


@pytest.mark.parametrize("fields", [{"outputs": ["text"]}, {"parameters": {"seed": 1}}, {"caller": "other"}])
async def test_a_session_with_other_content_is_rejected(echo: Mesh, fields: dict[str, Any]) -> None:
    async with talking(echo.stub, session_id="s", parameters={"seed": 7}):
        other = Talk(echo.stub)
        await other.send(seq=0, open={"session_id": "s", "parameters": {"seed": 7}, **fields})
        error = await other.failure()
    assert (type(error), error.reason) == (ExistsError, "SESSION_EXISTS")
