"""The events that wait for the client of a call."""

import asyncio
from contextlib import aclosing

import pytest

from stagemesh.common.errors import ReplacedError
from stagemesh.orchestrator.session.session_call import SessionCall, generated_response
from stagemesh.orchestrator.session.turn_requests import Answer, EndedRequest
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.session.fake_runner import settle


def failed_answer() -> Answer:
    return Answer(1, EndedRequest(ReplacedError("by another", reason="SESSION_REPLACED")))


async def test_a_call_ends_after_the_events_that_wait() -> None:
    call, received = SessionCall(), list[bytes]()
    call.send(b"1")
    call.end(ReplacedError("by another", reason="SESSION_REPLACED"))
    call.end()
    call.send(b"2")
    with pytest.raises(ReplacedError):
        async for event in call.events():
            received.append(event)
    assert received == [b"1", b"2"]


async def test_an_answer_waits_for_the_client() -> None:
    call, answer = SessionCall(), failed_answer()

    async def generate() -> None:
        for _ in range(20):
            await call.send_generated(answer, b"")

    generating = asyncio.ensure_future(generate())
    await settle()
    assert not generating.done()
    async with aclosing(call.events()) as events:
        for _ in range(20):
            await anext(events)
    await generating


async def test_only_the_events_of_the_dropped_answer_are_dropped() -> None:
    call, dropped, other = SessionCall(), failed_answer(), failed_answer()
    call.send(b"1")
    for answer in (other, dropped, dropped):
        await call.send_generated(answer, b"2")
    call.drop(dropped)
    call.end()
    assert len([event async for event in call.events()]) == 2


async def test_a_client_that_reads_nothing_is_not_read_any_longer() -> None:
    call = SessionCall()
    for _ in range(300):
        call.send(b"rejected")
    waiting = asyncio.ensure_future(call.wait_for_space())
    await settle()
    assert not waiting.done()
    call.end()
    async for _ in call.events():
        pass
    await waiting


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 20_000, 3_000_000])
@pytest.mark.parametrize("turn", [1, 300, 2**40])
def test_an_event_is_contained_without_being_parsed(size: int, turn: int) -> None:
    event = orchestrator_pb2.GenerateResponse(output=request_pb2.Output(name="text", text="x" * size))
    parsed = orchestrator_pb2.ConverseResponse.FromString(generated_response(turn, event.SerializeToString()))
    assert parsed == orchestrator_pb2.ConverseResponse(turn=turn, generated=event)
