"""StageService over a real connection."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagemesh.common import errors
from stagemesh.common.plugins import connectors
from stagemesh.common.process.host import host_token
from stagemesh.common.wire.versions import OFFERS, own_protocol
from stagemesh.rpc.channels import open_channel
from stagemesh.services.engines.abilities import Adapter, EngineAbilities
from stagemesh.services.stage.step import run
from stagemesh.services.stage.step.spec import STATE_EDGE
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from stagemesh.v1.signature_pb2 import TENSOR_KIND_TEXT
from tests.credentials import issue, process_credentials
from tests.later_contract import later, today
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import Replica, failure_of, loading, served, served_stage, stage_config, step_request
from tests.stage.test_execute_steps import calling, eventually


async def call_step(replica: Replica, request: stage_pb2.ExecuteStepRequest) -> list[stage_pb2.ExecuteStepResponse]:
    """Returns all events of a step."""
    return [event async for event in replica.stub.ExecuteStep(request)]


async def test_an_error_has_its_reason_and_stage() -> None:
    async with served_stage(stage_config(fail_at_step=1)) as replica:
        error = await failure_of(call_step(replica, step_request()))
    assert "fails at step 1" in error.message
    assert error.metadata == {"stage": "thinker", "replica": "thinker-0", "request_id": "r"}


async def test_cancelling_the_call_stops_the_engine(engine: GatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ABANDON_S", 0.0)
    async with served_stage(engine=engine) as replica:
        call = replica.stub.ExecuteStep(step_request())
        await anext(aiter(call))
        await eventually(lambda: engine.running == ["r"])
        call.cancel()
        await eventually(lambda: not engine.running)
        assert engine.released == ["r"]


async def test_one_of_two_callers_may_leave(engine: GatedEngine) -> None:
    async with served_stage(engine=engine) as replica:
        leaving, staying = (replica.stub.ExecuteStep(step_request()) for _ in range(2))
        events = aiter(staying)
        await anext(aiter(leaving))
        await anext(events)
        leaving.cancel()
        engine.gate.set()
        assert [event.WhichOneof("event") async for event in events] == ["output", "output", "finished"]


async def test_cancel_returns_once_the_engine_has_released_the_step(engine: GatedEngine) -> None:
    async with served_stage(engine=engine) as replica:
        call = replica.stub.ExecuteStep(step_request())
        await anext(aiter(call))
        await eventually(lambda: engine.running == ["r"])
        answer = await replica.stub.CancelStep(stage_pb2.CancelStepRequest(request_id="r", reason="enough"))
        assert (answer.stopped, engine.released) == (1, ["r"])
        assert not (await replica.stub.CancelStep(stage_pb2.CancelStepRequest(request_id="r"))).stopped
        error = await failure_of(call_step(replica, step_request()))
    assert (type(error), error.message) == (errors.CancelledRequestError, "enough")


async def test_describe_returns_the_description_of_the_replica() -> None:
    async with loading() as runtime, served(runtime) as replica:
        description = await replica.stub.Describe(stage_pb2.DescribeRequest())
        assert (description.state, description.detail) == (stage_pb2.REPLICA_STATE_LOADING, "starting")
        await runtime.start()
        description = await replica.stub.Describe(stage_pb2.DescribeRequest())
    assert (description.pipeline, description.stage) == ("test", "thinker")
    assert (description.replica, description.engine) == ("thinker-0", "fake")
    assert description.state == stage_pb2.REPLICA_STATE_READY
    (emitted,) = description.signature.emits
    assert (emitted.spec.name, list(emitted.spec.shape), emitted.kind) == ("text", ["bytes"], TENSOR_KIND_TEXT)
    assert (description.signature.sampling, description.signature.can_pause) == (True, True)
    assert {chunk_pb2.CONNECTOR_SHM, chunk_pb2.CONNECTOR_GRPC} <= set(description.connectors)
    assert description.protocol == own_protocol(OFFERS)


@pytest.mark.parametrize(("configured", "expected"), [(None, "by environment"), ("rack-4", "rack-4"), ("", "")])
async def test_a_replica_has_a_location(monkeypatch: pytest.MonkeyPatch, configured: str | None, expected: str) -> None:
    monkeypatch.setenv("STAGEMESH_ZONE", "by environment")
    async with served_stage(replace(stage_config(), zone=configured)) as replica:
        description = await replica.stub.Describe(stage_pb2.DescribeRequest())
    assert (description.host, description.zone) == (host_token(), expected)
    assert len(description.host) == 16


async def test_a_loading_replica_rejects_steps_with_the_cause() -> None:
    async with loading() as runtime, served(runtime) as replica:
        error = await failure_of(call_step(replica, step_request()))
    assert isinstance(error, errors.NotReadyError)
    assert "replica thinker-0 of stage thinker is loading: starting" in error.message


async def test_load_is_reported_at_once_and_periodically(engine: GatedEngine) -> None:
    async with served_stage(engine=engine) as replica:
        reports = aiter(replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(interval_s=0.05)))
        first = await anext(reports)
        step = replica.stub.ExecuteStep(step_request())
        await anext(aiter(step))
        await eventually(lambda: engine.running == ["r"])
        later = first
        while not later.running:
            later = await anext(reports)
        step.cancel()
    assert (first.running, first.work_s, later.running, later.work_s) == (0, 0.0, 1, 2.5)
    assert first.arena_size_bytes > first.arena_used_bytes == 0
    assert first.free_memory_bytes > 0


async def test_idle_replicas_report_less_often(engine: GatedEngine) -> None:
    async with served_stage(engine=engine) as replica:
        reports = aiter(replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(interval_s=0.05, idle_interval_s=3600)))
        running = [(await anext(reports)).running]
        step = replica.stub.ExecuteStep(step_request())
        await anext(aiter(step))
        running += [(await anext(reports)).running]
        step.cancel()
        while running[-1]:
            running += [(await anext(reports)).running]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(reports), 0.3)
    assert (running[0], running[1], running[-1]) == (0, 1, 0)


async def test_an_idle_replica_reports_its_adapters_as_soon_as_they_change(engine: GatedEngine) -> None:
    loaded = list[Adapter]()
    adapters: Any = SimpleNamespace(list_adapters=lambda: list(loaded))
    engine.abilities = EngineAbilities(adapters=adapters)
    async with served_stage(engine=engine) as replica, asyncio.timeout(10):
        reports = aiter(replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(interval_s=0.05, idle_interval_s=3600)))
        names = [list((await anext(reports)).adapters)]
        for now in ([Adapter("x", "/x", 8), Adapter("y", "/y", 8)], [Adapter("y", "/y", 8)], []):
            loaded[:] = now
            names.append(list((await anext(reports)).adapters))
    assert names == [[], ["x", "y"], ["y"], []]


@pytest.mark.parametrize(
    ("interval_s", "idle_interval_s", "message"),
    [
        *((interval_s, 1.0, "must be at least 0.05") for interval_s in (0.01, -1.0, float("nan"))),
        *((0.05, idle_s, "it must be a number of seconds") for idle_s in (float("nan"), float("inf"), 1e308)),
    ],
)
async def test_an_interval_of_load_reports_is_checked(interval_s: float, idle_interval_s: float, message: str) -> None:
    async with served_stage() as replica:
        request = stage_pb2.WatchLoadRequest(interval_s=interval_s, idle_interval_s=idle_interval_s)
        error = await failure_of(anext(aiter(replica.stub.WatchLoad(request))))
    assert isinstance(error, errors.InvalidRequestError)
    assert message in error.message


async def test_closing_ends_the_load_reports() -> None:
    async with loading() as runtime, served(runtime) as replica:
        reports = aiter(replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(interval_s=60)))
        await anext(reports)
        await runtime.close()
        assert [report async for report in reports] == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stage/thinker/thinker-1", "UNKNOWN_FLOW"),
        ("orchestrator/main", "UNKNOWN_FLOW"),
        ("stage/talker/thinker-0", "REPLICA_MISMATCH"),
        ("stage/think/*", "REPLICA_MISMATCH"),
    ],
)
async def test_a_state_is_read_by_replicas_of_its_stage(tmp_path: Path, name: str, reason: str) -> None:
    request = stage_pb2.GetChunkRequest(key=chunk_pb2.EdgeKey(request_id="r", edge=STATE_EDGE, attempt=1))
    with process_credentials(issue(tmp_path, "stage/thinker/thinker-0")):
        async with served_stage() as replica:
            with process_credentials(issue(tmp_path, name)):
                channel = open_channel(replica.endpoint)
            async with channel:
                error = await failure_of(anext(aiter(stage_pb2_grpc.StageServiceStub(channel).GetChunk(request))))
    assert error.reason == reason


async def test_an_oversize_message_is_rejected() -> None:
    async with served_stage() as replica:
        error = await failure_of(call_step(replica, step_request(text="x" * (9 << 20))))
    assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")


async def _probe(thinker: Replica, endpoint: str, **fields: int) -> stage_pb2.ProbeEdgeResponse:
    named = {"connector": chunk_pb2.CONNECTOR_AUTO, **fields}
    request = stage_pb2.ProbeEdgeRequest(edge="thinker->talker", consumer="talker-0", endpoint=endpoint, **named)  # type: ignore[arg-type]
    return await thinker.stub.ProbeEdge(request, timeout=10)


async def test_a_probe_returns_the_connector_and_sends_nothing() -> None:
    async with served_stage() as thinker, served_stage(stage_config("talker", function="relay")) as talker:
        found = await _probe(thinker, talker.endpoint)
        assert (found.connector, len(found.refusals)) == (chunk_pb2.CONNECTOR_SHM, 0)
        assert thinker.runtime.load().arena_used_bytes == 0


async def test_a_fixed_connector_that_cannot_work_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "find_spec", lambda _: None)
    async with served_stage() as thinker, served_stage(stage_config("talker", function="relay")) as talker:
        error = await failure_of(_probe(thinker, talker.endpoint, connector=chunk_pb2.CONNECTOR_NIXL))
    assert (type(error), error.reason) == (errors.NotReadyError, "CONNECTOR_UNAVAILABLE")
    assert error.metadata["edge"] == "thinker->talker"
    assert "set `connector: auto`" in error.message


async def test_an_unknown_connector_is_rejected() -> None:
    async with served_stage() as thinker:
        assert (await failure_of(_probe(thinker, "127.0.0.1:1", connector=4711))).reason == "UNKNOWN_CONNECTOR"


async def test_a_stage_ignores_added_fields() -> None:
    async with calling(stage_config(steps=2)) as caller:
        request: Any = today(later(step_request("r")), stage_pb2.ExecuteStepRequest)
        await caller.begin(1, request)
        await caller.until_ended(1)
    assert not caller.received[1][-1].ended.HasField("error")
