"""The sessions of an orchestrator: how they park, linger and end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.session import registry as registry_module
from stagemesh.orchestrator.session.registry import SessionRegistry
from stagemesh.pipeline import load_pipeline
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, orchestrator_pb2
from tests.orchestrator.mesh import mesh
from tests.orchestrator.session.fake_runner import FakeRunner, Request, settle
from tests.orchestrator.session.scripts import ECHO
from tests.orchestrator.session.talk import talking

Open = orchestrator_pb2.SessionOpen


class Clock:
    """A clock that a test advances."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def registered(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[SessionRegistry, FakeRunner]]:
    """Runs a registry that looks at its sessions in each iteration of the event loop."""
    monkeypatch.setattr(registry_module, "_TICK_S", 0)
    path = folder / "echo.yaml"
    path.write_text(ECHO)
    pipeline = load_pipeline(str(path))
    runner = FakeRunner(pipeline)
    registry = SessionRegistry(pipeline, runner, clock=clock)
    async with registry.running():
        yield registry, runner
        registry.drain()


async def test_a_session_ends_when_its_client_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with registered(tmp_path, clock, monkeypatch) as (registry, _):
        session, call = await registry.open(Open(session_id="s", linger_s=10))
        registry.leave(session, call)
        clock.now_s = 9.9
        await settle()
        assert len(registry) == 1
        clock.now_s = 10
        await settle()
        assert len(registry) == 0


async def test_a_session_without_linger_ends_with_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with registered(tmp_path, Clock(), monkeypatch) as (registry, _):
        session, call = await registry.open(Open(session_id="s"))
        registry.leave(session, call)
        assert len(registry) == 0


async def test_a_session_lingers_for_an_hour_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with registered(tmp_path, Clock(), monkeypatch) as (registry, _):
        session, _ = await registry.open(Open(session_id="s", linger_s=100_000))
        assert session.linger_s == 3600


async def test_only_idle_sessions_park(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with registered(tmp_path, clock, monkeypatch) as (registry, runner):
        session, call = await registry.open(Open(session_id="s", linger_s=10))
        session.handle(call, Request(seq=1, append={"part": {"text": "hello"}}))  # type: ignore[arg-type]
        session.handle(call, Request(seq=2, commit={}))  # type: ignore[arg-type]
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


async def test_no_session_is_opened_while_the_orchestrator_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registered(tmp_path, Clock(), monkeypatch) as (registry, _):
        registry.drain()
        with pytest.raises(UnavailableError) as caught:
            await registry.open(Open(session_id="s"))
    assert caught.value.reason == "NOT_RUNNING"


async def test_a_session_is_opened_again_when_its_former_turn_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registered(tmp_path, Clock(), monkeypatch) as (registry, runner):
        session, call = await registry.open(Open(session_id="s"))
        session.handle(call, Request(seq=1, append={"part": {"text": "hello"}}))  # type: ignore[arg-type]
        session.handle(call, Request(seq=2, commit={}))  # type: ignore[arg-type]
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


async def test_the_status_of_the_pipeline_counts_sessions(tmp_path: Path) -> None:
    async with mesh(tmp_path, ECHO) as echo, talking(echo.stub, linger_s=60), talking(echo.stub):
        stub = admin_pb2_grpc.AdminServiceStub(echo.admin)
        (status,) = (await stub.ListPipelines(admin_pb2.ListPipelinesRequest())).pipelines
    assert (status.sessions, status.max_sessions) == (2, 1000)


async def test_an_ended_session_retains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with registered(tmp_path, Clock(), monkeypatch) as (registry, runner):
        session, call = await registry.open(Open(session_id="s"))
        session.handle(call, Request(seq=1, append={"part": {"text": "hello"}}))  # type: ignore[arg-type]
        session.handle(call, Request(seq=2, commit={}))  # type: ignore[arg-type]
        session.handle(call, Request(seq=3, append={"part": {"text": "more"}}))  # type: ignore[arg-type]
        runner.requests["s.1"].end()
        await settle()
        registry.leave(session, call)
        turns = session._turns
    assert (turns._transcript.size_bytes, turns.input.prompt.size_bytes, turns.answer) == (0, 0, None)
