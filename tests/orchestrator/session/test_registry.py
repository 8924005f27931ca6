"""The sessions of an orchestrator: how they park, linger and end, and the events that wait for their clients."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from stagemesh.common.errors import ReplacedError, UnavailableError
from stagemesh.orchestrator.session import registry as registry_module
from stagemesh.orchestrator.session.answer_relay import SessionCall, generated_response
from stagemesh.orchestrator.session.registry import SessionRegistry
from stagemesh.orchestrator.session.session import Session
from stagemesh.orchestrator.session.turn_requests import Answer, EndedRequest
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, orchestrator_pb2, request_pb2
from tests.orchestrator.mesh import Mesh, mesh
from tests.orchestrator.replicas import Clock
from tests.orchestrator.session.fake_runner import FakeRunner, settle
from tests.orchestrator.session.scripts import ECHO
from tests.orchestrator.session.talk import Request, talking
from tests.rpc.call_errors import raises

Open = orchestrator_pb2.SessionOpen


@pytest.fixture
def runner(pipeline: Pipeline) -> FakeRunner:
    return FakeRunner(pipeline)


@pytest.fixture
async def registry(
    pipeline: Pipeline, runner: FakeRunner, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[SessionRegistry]:
    """A registry that looks at its sessions in each iteration of the event loop."""
    monkeypatch.setattr(registry_module, "_TICK_S", 0)
    registry = SessionRegistry(pipeline, runner, clock=clock)
    async with registry.running():
        yield registry
        registry.drain()


def ask(session: Session, call: SessionCall) -> None:
    """Sends a turn."""
    session.handle(call, Request(seq=1, append={"part": {"text": "hello"}}))  # type: ignore[arg-type]
    session.handle(call, Request(seq=2, commit={}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("linger_s", "lasts_s"), [(0, 0.0), (10, 10.0), (100_000, 3600.0)])
async def test_a_session_ends_when_its_client_does_not_return(
    registry: SessionRegistry, clock: Clock, linger_s: int, lasts_s: float
) -> None:
    session, call = await registry.open(Open(session_id="s", linger_s=linger_s))
    registry.leave(session, call)
    if lasts_s:
        clock.now_s = lasts_s - 0.1
        await settle()
        assert len(registry) == 1
        clock.now_s = lasts_s
        await settle()
    assert len(registry) == 0


async def test_only_idle_sessions_park(registry: SessionRegistry, runner: FakeRunner, clock: Clock) -> None:
    session, call = await registry.open(Open(session_id="s", linger_s=10))
    ask(session, call)
    clock.now_s = 1000
    await settle()
    runner.requests["s.1"].end()
    await settle()
    clock.now_s = 1059
    await settle()
    assert not call.has_ended
    clock.now_s = 1060
    await settle()
    assert call.has_ended


async def test_no_session_is_opened_while_the_orchestrator_stops(registry: SessionRegistry) -> None:
    registry.drain()
    with raises(UnavailableError, reason="NOT_RUNNING"):
        await registry.open(Open(session_id="s"))


async def test_a_session_opens_when_its_last_turn_is_released(registry: SessionRegistry, runner: FakeRunner) -> None:
    session, call = await registry.open(Open(session_id="s"))
    ask(session, call)
    request = runner.requests["s.1"]
    request.record.stop_by(lambda _: None)
    registry.leave(session, call)
    opening = asyncio.ensure_future(registry.open(Open(session_id="s", earlier_calls=1)))
    await settle()
    assert not opening.done()
    request.end()
    await opening


async def test_the_next_turn_prefers_the_replicas_of_the_former_one(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO, replicas=8) as echo, talking(echo.stub, session_id="s") as talk:
        for _ in range(6):
            await talk.turn("hello")
        used = [name for name, stage in echo.stages.items() if stage.requests]
    assert len(used) == 1


async def test_the_status_of_the_pipeline_counts_sessions(echo: Mesh) -> None:
    async with talking(echo.stub, linger_s=60), talking(echo.stub):
        stub = admin_pb2_grpc.AdminServiceStub(echo.admin)
        (status,) = (await stub.ListPipelines(admin_pb2.ListPipelinesRequest())).pipelines
    assert (status.sessions, status.max_sessions) == (2, 1000)


async def test_an_ended_session_retains_nothing(registry: SessionRegistry, runner: FakeRunner) -> None:
    session, call = await registry.open(Open(session_id="s"))
    ask(session, call)
    session.handle(call, Request(seq=3, append={"part": {"text": "more"}}))  # type: ignore[arg-type]
    runner.requests["s.1"].end()
    await settle()
    registry.leave(session, call)
    turns = session._turns
    assert (turns._transcript.size_bytes, turns.input.prompt.size_bytes, turns.answer) == (0, 0, None)


# -- the events that wait for the client of a call


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
