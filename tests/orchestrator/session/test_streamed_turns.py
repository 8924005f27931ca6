"""Turns whose input is streamed: their request starts with the first piece."""

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InternalError, OverloadedError
from stagemesh.v1 import orchestrator_pb2
from tests.orchestrator.session.fake_runner import Chat, chatting, settle
from tests.orchestrator.session.scripts import SPEAK, STREAM


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncGenerator[Chat]:
    """A session whose input is streamed."""
    async with chatting(tmp_path, SPEAK, input_mode=STREAM) as chat:
        yield chat


def words(chat: Chat, turn: int) -> str:
    """Returns the text that was streamed into the request of a turn."""
    packets = chat.request(turn).packets
    return b"".join(packet.tensors["text"].tobytes() for packet in packets).decode()


async def test_the_answer_begins_before_the_commit(chat: Chat) -> None:
    for text in ("Hello ", "world. "):
        chat.say(text)
    assert words(chat, 1) == "Hello world. "
    chat.request(1).emit("spoken")
    await settle()
    assert chat.text(1) == "spoken"
    chat.commit()
    await chat.answer(1)
    assert chat.kinds(1) == ["committed", "ended"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_input_waits_for_the_end_of_the_former_turn_and_for_its_client(chat: Chat, leaves: bool) -> None:
    chat.commit("one")
    chat.say("two")
    if leaves:
        await chat.leave()
    assert "s.2" not in chat.runner.requests
    await chat.answer(1)
    if leaves:
        assert "s.2" not in chat.runner.requests
        chat.attach(is_known=True, linger_s=60, turn=1)
    assert words(chat, 2) == "two"


async def test_clearing_the_input_ends_the_turn(chat: Chat) -> None:
    chat.say("one")
    chat.send(clear={})
    chat.say("two")
    await settle()
    assert words(chat, 2) == "two"
    assert chat.kinds(1) == ["interrupted", "ended"]


async def test_the_open_turn_may_be_interrupted(chat: Chat) -> None:
    chat.say("one")
    chat.request(1).emit("spoken")
    await settle()
    chat.send(interrupt={})
    await settle()
    assert chat.request(1).ended.done()
    assert chat.kinds(1) == ["interrupted", "ended"]
    assert chat.last("ended").ended.answer == "spoken"


@pytest.mark.parametrize("error", [None, InternalError("broken")])
async def test_a_turn_whose_request_ends_early_awaits_its_commit(chat: Chat, error: InternalError | None) -> None:
    chat.say("one")
    await chat.answer(1, error=error)
    chat.commit("more")
    await settle()
    rejected = [each.rejected.error.reason for each in chat.received if each.HasField("rejected")]
    assert chat.kinds(1) == ["committed", "ended"]
    assert chat.last("ended").ended.error.reason == ("" if error is None else "INTERNAL")
    assert rejected == ([] if error is None else ["INTERNAL"])


@pytest.mark.parametrize("error", [None, InternalError("broken")])
@pytest.mark.parametrize("received", ["", "spo"])
async def test_outputs_of_an_ended_request_come_first(chat: Chat, error: InternalError | None, received: str) -> None:
    chat.say("one")
    if received:
        chat.request(1).emit(received)
        await settle()
    await chat.leave()
    chat.request(1).emit("spoken"[len(received) :])
    await chat.answer(1, error=error)
    position = orchestrator_pb2.OutputPosition(name="text", position=len(received))
    chat.attach(is_known=True, turn=1, next_positions=[position])
    chat.commit()
    await settle()
    assert chat.text(1) == "spoken"
    kinds = [event.WhichOneof("event") for event in chat.received if event.turn == 1]
    assert kinds.index("ended") == len(kinds) - 1
    assert chat.last("ended").ended.answer == "spoken"
    assert chat.last("ended").ended.HasField("error") == (error is not None)


async def test_a_piece_is_rejected_if_its_turn_cannot_start(chat: Chat) -> None:
    chat.runner.error = OverloadedError("full", reason="ADMISSION_LIMIT", retry_after_s=1)
    chat.say("one")
    assert await chat.rejection() == "ADMISSION_LIMIT"
    chat.say("again")
    assert words(chat, 1) == "again"


async def test_a_waiting_turn_that_cannot_start_fails_when_it_is_committed(chat: Chat) -> None:
    chat.commit("one")
    chat.say("two")
    chat.runner.error = OverloadedError("full", reason="ADMISSION_LIMIT", retry_after_s=1)
    await chat.answer(1)
    chat.commit()
    await settle()
    assert chat.last("ended").ended.error.reason == "ADMISSION_LIMIT"
    assert chat.kinds(2) == ["committed", "ended"]


async def test_credit_returns_when_stages_consume(chat: Chat) -> None:
    limit = chat.session._turns.input.credit.limit_bytes
    chat.say("x" * limit)
    chat.say("y")
    assert await chat.rejection() == "INPUT_OVER_CREDIT"
    await chat.answer(1)
    assert chat.last("grant").grant.input_limit_bytes == 2 * limit
    chat.say("z")
    await settle()
    assert [each.rejected.seq for each in chat.received if each.HasField("rejected")] == [2]


async def test_a_kind_that_no_edge_carries_is_rejected(chat: Chat) -> None:
    chat.hear(np.zeros(160, np.float32))
    assert await chat.rejection() == "UNSUPPORTED"
    chat.send(append={"message": {"role": "ROLE_USER", "content": "hello"}})
    assert await chat.rejection() == "UNSUPPORTED"
    assert chat.runner.requests == {}
