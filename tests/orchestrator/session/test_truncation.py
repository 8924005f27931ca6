"""The transcript contains the part of an answer that the user has heard."""

from pathlib import Path

import pytest

from stagemesh.common.requests.turn_content import shorten
from stagemesh.orchestrator.session.turns import Transcript, TranscriptTurn, restored_turn
from stagemesh.v1 import request_pb2
from tests.orchestrator.session.fake_runner import chatting, settle
from tests.orchestrator.session.scripts import ECHO

TWO = """
pipeline: two
main_stage: a
stages:
  a: {engine: fake, function: source}
  b: {engine: fake, function: relay}
edges: [{from: a, to: b}]
outputs: {spoken: b, text: a}
"""


@pytest.mark.parametrize(
    ("length", "heard"),
    [
        (0, ""),
        (2, ""),
        (3, "one"),
        (4, "one"),
        (6, "one"),
        (7, "one two"),
        (13, "one two three"),
        (99, "one two three"),
    ],
)
def test_an_answer_is_cut_at_the_end_of_a_word(length: int, heard: str) -> None:
    assert shorten("one two three", length=length) == heard


async def test_a_named_text_is_cut_at_its_position(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("hello")
        chat.send(commit={})
        chat.request(1).emit("one two")
        chat.request(1).end()
        await settle()
        chat.send(truncate={"turn": 1, "positions": [{"name": "text", "position": 5}]})
        chat.say("more")
        chat.send(commit={})
        await settle()
        assert chat.prompt(2) == ["hello", "one t", "more"]
    assert chat.last("truncated").truncated.answer == "one t"


async def test_the_text_is_cut_at_the_share_of_another_output(tmp_path: Path) -> None:
    async with chatting(tmp_path, TWO) as chat:
        chat.say("hello")
        chat.send(commit={})
        chat.request(1).emit("one two three four")
        chat.request(1).emit("0123456789", name="spoken")
        await settle()
        chat.send(interrupt={})
        chat.send(truncate={"turn": 1, "positions": [{"name": "spoken", "position": 5}]})
        await settle()
    assert chat.last("truncated").truncated.answer == "one two"


async def test_a_truncation_never_lengthens_an_answer(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("hello")
        chat.send(commit={})
        chat.request(1).emit("one two")
        chat.request(1).end()
        await settle()
        for position in (3, 7):
            chat.send(truncate={"turn": 1, "positions": [{"name": "text", "position": position}]})
        await settle()
    assert [each.truncated.answer for each in chat.received if each.HasField("truncated")] == ["one", "one"]


async def test_an_answer_can_be_truncated_while_the_next_turn_is_answered(tmp_path: Path) -> None:
    async with chatting(tmp_path, ECHO) as chat:
        chat.say("one")
        chat.send(commit={})
        chat.request(1).emit("answer")
        chat.request(1).end()
        await settle()
        chat.say("two")
        chat.send(commit={})
        chat.send(truncate={"turn": 1, "positions": [{"name": "text", "position": 3}]})
        chat.request(2).end()
        await settle()
        chat.say("three")
        chat.send(commit={})
        assert chat.prompt(3) == ["one", "ans", "two", "", "three"]


async def test_the_text_that_the_client_wants_is_the_answer(tmp_path: Path) -> None:
    async with chatting(tmp_path, TWO, outputs=["spoken"]) as chat:
        await settle()
        opened = chat.received[0].opened
    assert (opened.transcript_output, list(opened.outputs)) == ("spoken", ["spoken"])


async def test_the_text_of_the_main_stage_is_preferred(tmp_path: Path) -> None:
    async with chatting(tmp_path, TWO) as chat:
        await settle()
    assert chat.received[0].opened.transcript_output == "text"


def test_the_size_of_a_transcript_follows_its_turns() -> None:
    transcript = Transcript()
    turn = TranscriptTurn(b"12", "é")
    transcript.add(turn)
    assert transcript.size_bytes == 4
    assert transcript.pop() == turn
    assert transcript.size_bytes == 0


def test_a_restored_turn_without_an_answer_has_an_empty_one() -> None:
    message = request_pb2.Message(role=request_pb2.ROLE_USER, content="hello")
    assert restored_turn([message]).answer == ""
    assert restored_turn([]).messages == b""
