"""Sessions over gRPC, with scripted stages."""

import asyncio
from pathlib import Path

from stagemesh.common.errors import UnavailableError
from stagemesh.v1 import request_pb2
from tests.orchestrator.mesh import ask, mesh
from tests.orchestrator.scripted_stage import hang, say_hello
from tests.orchestrator.session.scripts import ECHO, Steered, fail
from tests.orchestrator.session.talk import talking


async def test_a_turn_is_answered(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub, session_id="s") as talk:
        answer = await talk.turn("hello")
    assert answer == "a done"
    assert talk.kinds(1) == ["committed", "ended"]
    assert talk.texts(1, "last") == "c done"


async def test_the_prompt_contains_the_transcript(tmp_path: Path) -> None:
    opening = request_pb2.Conversation(messages=[request_pb2.Message(role=request_pb2.ROLE_SYSTEM, content="be brief")])
    async with mesh(tmp_path) as chain, talking(chain.stub, session_id="s", conversation=opening) as talk:
        await talk.turn("one")
        await talk.turn("two")
        prompt = chain.stages["a"].requests[1].input.conversation
    assert [message.content for message in prompt.messages] == ["be brief", "one", "a done", "two"]


async def test_turns_are_requests_with_consecutive_seeds(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub, session_id="s") as talk:
        seed = talk.received[0].opened.seed
        for text in ("one", "two"):
            await talk.turn(text)
        steps = [(step.request_id, step.seed) for step in chain.stages["a"].requests]
    assert steps == [("s.1", seed), ("s.2", seed + 1)]


async def test_the_text_of_the_answer_is_sent_even_if_it_is_not_wanted(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub, outputs=["last"]) as talk:
        opened = talk.received[0].opened
        assert await talk.turn("hello") == "c done"
    assert (list(opened.outputs), opened.transcript_output) == (["last"], "last")


async def test_the_input_of_the_next_turn_may_be_appended_while_a_turn_is_answered(tmp_path: Path) -> None:
    script = Steered()
    async with mesh(tmp_path, ECHO, scripts={"a": script}) as echo, talking(echo.stub, session_id="s") as talk:
        await talk.say("one")
        await talk.commit()
        await talk.next("committed")
        await talk.say("two")
        script.emit("answer")
        script.finish()
        await talk.next("ended")
        await talk.commit()
        committed = await talk.next("committed")
    assert committed.turn == 2


async def test_nothing_of_an_interrupted_turn_follows_its_interruption(tmp_path: Path) -> None:
    script = Steered()
    async with mesh(tmp_path, ECHO, scripts={"a": script}) as echo, talking(echo.stub, session_id="s") as talk:
        await talk.say("one")
        await talk.commit()
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
    assert talk.texts(1, "text") == "some words"


async def test_an_interrupted_request_is_stopped_on_its_stages(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, scripts={"a": hang}) as echo, talking(echo.stub) as talk:
        await talk.say("one")
        await talk.commit()
        await talk.output("a ")
        await talk.interrupt()
        await talk.next("ended")
        await echo.until_idle()
        assert len(echo.stages["a"].cancels) == 1


async def test_a_failed_turn_leaves_the_session_usable(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, scripts={"a": fail}) as echo, talking(echo.stub, session_id="s") as talk:
        await talk.say("one")
        await talk.commit()
        failed = (await talk.next("ended")).ended
        echo.stages["a"].script = say_hello
        assert await talk.turn("two") == "a done"
        prompt = echo.stages["a"].requests[-1].input.conversation
    assert (failed.error.reason, failed.answer) == ("INVALID_REQUEST", "")
    assert [message.content for message in prompt.messages] == ["one", "", "two"]


async def test_a_turn_that_cannot_start_is_rejected_and_keeps_its_input(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO) as echo, talking(echo.stub, session_id="s") as talk:
        _ = [event async for event in echo.stub.Generate(ask(request_id="s.1"))]
        await talk.say("one")
        await talk.commit()
        rejected = await talk.rejection()
    assert rejected.error.reason == "REQUEST_EXISTS"
    assert talk.kinds(1) == []


async def test_a_client_that_sends_no_more_receives_the_answer(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub) as talk:
        await talk.say("one")
        await talk.commit()
        await talk.call.done_writing()
        await talk.rest()
    assert talk.kinds(1) == ["committed", "ended"]


async def test_a_closed_session_stops_its_turn_and_ends_the_call(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, scripts={"a": hang}) as echo, talking(echo.stub) as talk:
        await talk.say("one")
        await talk.commit()
        await talk.output("a ")
        await talk.close()
        await talk.rest()
        await echo.until_idle()
    assert talk.kinds(1) == ["committed", "interrupted", "ended"]


async def test_idle_sessions_park(tmp_path: Path) -> None:
    parked = ECHO + "sessions: {park_s: 0.1}\n"
    async with mesh(tmp_path, parked) as echo, talking(echo.stub, session_id="s", linger_s=30) as talk:
        error = await talk.failure()
        async with talking(echo.stub, session_id="s", linger_s=30, earlier_calls=1) as again:
            assert again.received[0].opened.is_known
    assert isinstance(error, UnavailableError)
    assert error.reason == "SESSION_PARKED"


async def test_a_stopping_orchestrator_ends_idle_calls(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO) as echo, talking(echo.stub) as talk:
        await talk.turn("one")
        stopping = asyncio.ensure_future(echo.stop())
        error = await talk.failure()
        await stopping
    assert error.reason == "NOT_RUNNING"


async def test_a_stopping_orchestrator_lets_a_turn_finish(tmp_path: Path) -> None:
    script = Steered()
    async with mesh(tmp_path, ECHO, scripts={"a": script}, drain_s=10) as echo, talking(echo.stub) as talk:
        await talk.say("one")
        await talk.commit()
        await talk.next("committed")
        stopping = asyncio.ensure_future(echo.stop())
        script.emit("answer")
        script.finish()
        error = await talk.failure()
        await stopping
    assert (talk.texts(1, "text"), error.reason) == ("answer", "NOT_RUNNING")
    assert talk.kinds(1) == ["committed", "ended"]


async def test_a_stopping_orchestrator_leaves_a_long_turn_to_others(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, scripts={"a": hang}) as echo, talking(echo.stub) as talk:
        await talk.say("one")
        await talk.commit()
        await talk.output("a ")
        stopping = asyncio.ensure_future(echo.stop())
        error = await talk.failure()
        await stopping
    assert (talk.kinds(1), error.reason) == (["committed"], "NOT_RUNNING")
