"""Tests of AdminService with scripted stages."""

import asyncio
import math
import re
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import pytest

from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.common.wire.versions import own_protocol
from stagemesh.orchestrator import descriptions
from stagemesh.orchestrator.admin.servicer import SERVICE_NAME
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.orchestrator.mesh import Mesh, ask, mesh, poll, until_health
from tests.orchestrator.scripted_stage import Response, ScriptedStage, hang
from tests.rpc.call_errors import error_of
from tests.rpc.health_calls import Request as HealthRequest
from tests.rpc.health_calls import Response as HealthResponse
from tests.rpc.health_calls import check

TO_B = (("stagemesh-replica", "b-0"),)
"""The metadata of a control call that is forwarded to replica b-0."""


def _admin(mesh: Mesh) -> "admin_pb2_grpc.AdminServiceAsyncStub":
    return admin_pb2_grpc.AdminServiceStub(mesh.admin)


def _controls(mesh: Mesh) -> "control_pb2_grpc.StageControlServiceAsyncStub":
    return control_pb2_grpc.StageControlServiceStub(mesh.admin)


async def _begin(mesh: Mesh, *names: str) -> list[asyncio.Task[StagemeshError]]:
    """Starts requests, and returns when the first and the last stage of each have reported."""
    tasks: list[asyncio.Task[StagemeshError]] = []
    for name in names:
        call = mesh.stub.Generate(ask(request_id=name), timeout=20)
        outputs = set[str]()
        while outputs != {"first", "last"}:
            event = await anext(aiter(call))
            outputs |= {event.output.name} & {"first", "last"}
        tasks.append(asyncio.ensure_future(error_of(call)))
    return tasks


async def _list(mesh: Mesh, **fields: "int | str | list[int]") -> admin_pb2.ListRequestsResponse:
    request = admin_pb2.ListRequestsRequest(**fields)  # type: ignore[arg-type]
    return await _admin(mesh).ListRequests(request, timeout=10)


async def _drain(mesh: Mesh, target: str, *, force: bool = False, wait: bool = False, within_s: float = 10) -> object:
    request = admin_pb2.DrainReplicasRequest(target=target, force=force, wait=wait)
    return await _admin(mesh).DrainReplicas(request, timeout=within_s)


@pytest.mark.parametrize("facet", ["", "liveness", SERVICE_NAME, "stagemesh.v1.StageControlService"])
async def test_the_operators_port_has_its_own_health(chain: Mesh, facet: str) -> None:
    answer = await check(chain.admin)(HealthRequest(service=facet), timeout=10)
    assert answer.status == HealthResponse.SERVING


async def test_stages_and_replicas_are_listed_in_the_order_of_the_pipeline(chain: Mesh) -> None:
    stages = await _admin(chain).ListStages(admin_pb2.ListStagesRequest(), timeout=10)
    assert [(stage.name, stage.ready, stage.replicas) for stage in stages.stages] == [(name, 1, 1) for name in "abc"]
    assert [replica.name for replica in await chain.list_replicas()] == ["a-0", "b-0", "c-0"]


async def test_a_replicas_status_has_its_identity_and_its_location(chain: Mesh) -> None:
    told = chain.stages["b"].description
    (replica,) = await chain.list_replicas(stage="b")
    assert (replica.generation, replica.incarnation) == (chain.pipeline.generation, told.incarnation)
    assert (replica.host, replica.zone, replica.server_name) == (told.host, told.zone, "b.example")
    assert "" not in (told.incarnation, told.host, told.zone)


async def test_clients_and_operators_see_the_same_status_of_a_replica(chain: Mesh) -> None:
    await _until_all_loads_are_known(chain)
    listed = await chain.list_replicas(stage="b")
    described = await chain.describe()
    assert [list(stage.replicas) for stage in described.stages if stage.name == "b"] == [list(listed)]


async def test_peers_receive_the_name_in_a_replicas_certificate(chain: Mesh) -> None:
    await chain.generate()
    assert {probe.server_name for probe in chain.stages["a"].probes} == {"b.example"}
    assert [output.server_name for output in chain.stages["a"].requests[-1].outputs] == ["b.example"]


async def test_the_server_and_its_replicas_say_what_they_speak(chain: Mesh) -> None:
    server = await _admin(chain).DescribeServer(admin_pb2.DescribeServerRequest(protocol=own_protocol()), timeout=10)
    assert server.protocol == own_protocol()
    assert server.protocol.software == f"stagemesh {version('stagemesh')}"
    assert [replica.protocol for replica in await chain.list_replicas()] == [own_protocol()] * 3


async def test_the_server_refuses_an_operator_without_a_common_version(chain: Mesh) -> None:
    request = admin_pb2.DescribeServerRequest(protocol=Protocol(lowest_version=2, highest_version=2))
    error = await error_of(_admin(chain).DescribeServer(request, timeout=10))
    assert (error.reason, "the caller speaks wire versions 2 to 2" in error.message) == ("NO_COMMON_VERSION", True)


@pytest.mark.parametrize("token", ["x", "-1", "²", pytest.param("9" * 5000, id="long")])
async def test_an_invalid_page_token_is_rejected(chain: Mesh, token: str) -> None:
    assert (await error_of(_list(chain, page_token=token))).reason == "INVALID_PAGE_TOKEN"


async def test_replicas_are_filtered_by_stage_and_state(chain: Mesh) -> None:
    ready = await chain.list_replicas(stage="b", state=stage_pb2.REPLICA_STATE_READY)
    assert [replica.name for replica in ready] == ["b-0"]
    assert not await chain.list_replicas(stage="b", state=stage_pb2.REPLICA_STATE_ASLEEP)


async def test_an_unknown_replica_state_is_rejected(chain: Mesh) -> None:
    error = await error_of(chain.list_replicas(state=99))
    assert error.message == "unknown replica state 99; states: 1, 2, 3, 4, 5, 6"


async def test_loads_are_served_as_last_reported_without_asking_the_replicas(chain: Mesh) -> None:
    await _until_all_loads_are_known(chain)
    for stage in chain.stages.values():
        stage.tells_load = False
    listed = await chain.list_replicas()
    assert {each.name: each.HasField("load") for each in listed} == {"a-0": True, "b-0": True, "c-0": True}


async def test_an_overdue_load_report_is_listed_with_its_age(chain: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    await _until_all_loads_are_known(chain)
    monkeypatch.setattr(descriptions, "_OVERDUE_S", 3.0)
    chain.stages["b"].tells_load = False

    async def read_details() -> dict[str, str]:
        return {each.name: each.detail for each in await chain.list_replicas()}

    details = await poll(read_details, until=lambda details: details["b-0"] != "")
    assert re.fullmatch(r"last load report \d+ s ago", details.pop("b-0"))
    assert details == {"a-0": "", "c-0": ""}


async def _until_all_loads_are_known(mesh: Mesh) -> None:
    await poll(mesh.list_replicas, until=lambda listed: all(each.HasField("load") for each in listed))


async def test_a_pipelines_status_lists_the_load_of_each_caller(busy: Mesh) -> None:
    tasks = await _begin(busy, "r1")
    answer = await _admin(busy).ListPipelines(admin_pb2.ListPipelinesRequest(), timeout=10)
    (pipeline,) = answer.pipelines
    assert [(each.caller, each.in_flight, each.queued) for each in pipeline.callers] == [("", 1, 0)]
    assert pipeline.callers[0].in_flight_bytes == pipeline.in_flight_bytes > 0
    for task in tasks:
        task.cancel()


async def test_running_requests_are_listed_oldest_first_by_pages(busy: Mesh) -> None:
    tasks = await _begin(busy, "r1", "r2", "r3")
    first = await _list(busy, page_size=2)
    second = await _list(busy, page_size=2, page_token=first.next_page_token)
    assert [request.request_id for request in (*first.requests, *second.requests)] == ["r1", "r2", "r3"]
    assert not second.next_page_token
    for task in tasks:
        task.cancel()


async def test_ended_requests_are_found_by_their_state(chain: Mesh) -> None:
    await chain.generate(request_id="done")
    assert not (await _list(chain)).requests
    found = await _list(chain, states=[admin_pb2.REQUEST_STATE_FINISHED], target="b")
    assert [(request.request_id, request.output_parts) for request in found.requests] == [("done", 4)]


async def test_ended_requests_are_listed_newest_first_by_pages(chain: Mesh) -> None:
    for name in ("r1", "r2", "r3"):
        await chain.generate(request_id=name)
    states: list[int] = [admin_pb2.REQUEST_STATE_FINISHED, admin_pb2.REQUEST_STATE_FAILED]
    first = await _list(chain, states=states, page_size=2)
    second = await _list(chain, states=states, page_size=2, page_token=first.next_page_token)
    assert [request.request_id for request in (*first.requests, *second.requests)] == ["r3", "r2", "r1"]


async def test_a_request_shows_what_each_step_waits_for(tmp_path: Path) -> None:
    accepting = asyncio.Event()

    async def accept_later(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        accepting.set()
        await asyncio.Event().wait()
        yield Response()

    async with mesh(tmp_path, scripts={"a": hang, "b": accept_later, "c": hang}) as slow:
        call = slow.stub.Generate(ask(request_id="r"), timeout=20)
        await asyncio.wait_for(accepting.wait(), 5)
        answer = await _admin(slow).GetRequest(admin_pb2.GetRequestRequest(request_id="r"), timeout=10)
        call.cancel()
    waits = {step.stage: step.waits_for for step in answer.steps}
    assert waits["a"] == "b to accept the request"
    assert waits["b"] == "b-0 to accept the request"


async def test_a_request_shows_its_flows_from_both_ends(busy: Mesh) -> None:
    sent = control_pb2.FlowReport(edge="a->b", peer="b-0", connected=True, chunks=5, waiting_chunks=2)
    received = control_pb2.FlowReport(edge="a->b", peer="a-0", connected=True, chunks=3)
    busy.stages["a"].controls.reports.append(control_pb2.StepReport(attempt=1, started=True, outlets=[sent]))
    busy.stages["b"].controls.reports.append(control_pb2.StepReport(attempt=1, started=True, inlets=[received]))
    await _begin(busy, "r")
    answer = await _admin(busy).GetRequest(admin_pb2.GetRequestRequest(request_id="r"), timeout=10)
    assert [(flow.edge, flow.producer, flow.consumer) for flow in answer.flows] == [("a->b", "a-0", "b-0")]
    assert (answer.flows[0].sent, answer.flows[0].received) == (sent, received)
    assert {step.stage: step.waits_for for step in answer.steps}["b"] == "chunk 3 of edge a->b from a-0"


async def test_a_request_that_ended_shows_what_each_stage_did(chain: Mesh) -> None:
    await chain.generate(request_id="done")
    answer = await _admin(chain).GetRequest(admin_pb2.GetRequestRequest(request_id="done"), timeout=10)
    assert answer.request.state == admin_pb2.REQUEST_STATE_FINISHED
    assert {step.stage: (step.outputs, step.engine_steps) for step in answer.steps} == {
        "a": (2, 3),
        "b": (0, 3),
        "c": (2, 3),
    }
    for step in answer.steps:
        assert step.sent_s <= step.accepted_s <= step.ended_s


async def test_a_running_request_is_cancelled(busy: Mesh) -> None:
    (task,) = await _begin(busy, "r")
    request = admin_pb2.AdminServiceCancelRequestRequest(request_id="r")
    await _admin(busy).CancelRequest(request, timeout=10)
    assert isinstance(await task, CancelledRequestError)


async def test_cancelling_an_unknown_or_ended_request_is_an_error(chain: Mesh) -> None:
    await chain.generate(request_id="done")
    requests = [admin_pb2.AdminServiceCancelRequestRequest(request_id=name) for name in ("nobody", "done")]
    errors = [await error_of(_admin(chain).CancelRequest(request, timeout=10)) for request in requests]
    assert [error.reason for error in errors] == ["UNKNOWN_REQUEST", "REQUEST_ENDED"]
    assert "'done' has already finished" in errors[1].message


async def test_an_edge_is_probed_again(chain: Mesh) -> None:
    before = len(chain.stages["a"].probes)
    answer = await _admin(chain).ProbeEdge(admin_pb2.AdminServiceProbeEdgeRequest(edge="a->b"), timeout=10)
    assert [(link.producer, link.consumer) for link in answer.edge.links] == [("a-0", "b-0")]
    assert len(chain.stages["a"].probes) == before + 1


@pytest.mark.parametrize(
    ("edge", "producer", "reason"), [("a->z", "", "UNKNOWN_EDGE"), ("a->b", "c-0", "UNKNOWN_TARGET")]
)
async def test_an_unknown_edge_or_replica_is_not_probed(chain: Mesh, edge: str, producer: str, reason: str) -> None:
    request = admin_pb2.AdminServiceProbeEdgeRequest(edge=edge, producer=producer)
    assert (await error_of(_admin(chain).ProbeEdge(request, timeout=10))).reason == reason


@pytest.mark.parametrize("target", ["b", "b-0"])
async def test_the_last_replica_is_not_drained(chain: Mesh, target: str) -> None:
    error = await error_of(_drain(chain, target))
    assert (error.reason, error.metadata["stage"]) == ("LAST_REPLICA", "b")
    assert chain.stages["b"].description.state == stage_pb2.REPLICA_STATE_READY
    assert await chain.generate()


async def test_a_forced_drain_rejects_requests_until_resume(chain: Mesh) -> None:
    await _drain(chain, "b", force=True)
    assert (await chain.failure()).reason == "STAGE_NOT_READY"
    await _admin(chain).ResumeReplicas(admin_pb2.ResumeReplicasRequest(target="b"), timeout=10)
    assert await chain.generate()


async def test_a_wait_for_a_drain_ends_before_the_deadline_and_keeps_the_drain(busy: Mesh) -> None:
    await _begin(busy, "r")
    error = await error_of(_drain(busy, "b", force=True, wait=True, within_s=3))
    assert (error.reason, error.metadata["replica"]) == ("STILL_RUNNING", "b-0")
    assert busy.stages["b"].description.state == stage_pb2.REPLICA_STATE_DRAINING


async def test_a_wait_for_a_drain_returns_when_no_request_runs(busy: Mesh) -> None:
    await _begin(busy, "r")
    draining = asyncio.ensure_future(_drain(busy, "b", force=True, wait=True))
    await until_health(busy.channel, serving=False)
    assert not draining.done()
    await busy.cancel("r")
    await asyncio.wait_for(draining, 5)


@pytest.mark.parametrize("drain_s", [-1.0, math.nan])
async def test_a_restart_with_an_invalid_drain_time_is_rejected(chain: Mesh, drain_s: float) -> None:
    request = admin_pb2.RestartReplicasRequest(target="b", force=True, drain_s=drain_s)
    error = await error_of(anext(aiter(_admin(chain).RestartReplicas(request, timeout=10))))
    assert error.code.name == "INVALID_ARGUMENT"


async def test_the_error_of_an_unknown_target_lists_the_known_targets(chain: Mesh) -> None:
    error = await error_of(_drain(chain, "z"))
    assert error.reason == "UNKNOWN_TARGET"
    assert "stages: a, b, c; replicas: a-0, b-0, c-0" in error.message


async def test_control_calls_are_forwarded_to_the_named_replica(chain: Mesh) -> None:
    answer = await _controls(chain).Sleep(control_pb2.SleepRequest(level=2), timeout=10, metadata=TO_B)
    assert list(answer.asleep) == ["weights"]
    assert [request.level for request in chain.stages["b"].controls.slept] == [2]


@pytest.mark.parametrize(
    ("metadata", "reason"), [((), "NO_TARGET"), ((("stagemesh-replica", "z-9"),), "UNKNOWN_TARGET")]
)
async def test_a_control_call_names_a_replica(chain: Mesh, metadata: tuple[tuple[str, str], ...], reason: str) -> None:
    call = _controls(chain).Sleep(control_pb2.SleepRequest(level=1), timeout=10, metadata=metadata)
    assert (await error_of(call)).reason == reason


async def test_a_replica_itself_rejects_unsupported_control_calls(chain: Mesh) -> None:
    error = await error_of(_controls(chain).Wake(control_pb2.WakeRequest(), timeout=10, metadata=TO_B))
    assert error.code.name == "UNIMPLEMENTED"


async def test_a_forwarded_drain_cannot_bypass_the_check_of_the_last_replica(chain: Mesh) -> None:
    error = await error_of(_controls(chain).Drain(control_pb2.DrainRequest(), timeout=10, metadata=TO_B))
    assert "call AdminService.DrainReplicas" in error.message
    assert chain.stages["b"].description.state == stage_pb2.REPLICA_STATE_READY


async def test_snapshots_show_changes(chain: Mesh) -> None:
    call = _admin(chain).WatchPipeline(admin_pb2.WatchPipelineRequest(interval_s=0.2), timeout=20)
    first = await anext(aiter(call))
    await chain.generate()
    async with asyncio.timeout(10):
        while (now := await anext(aiter(call))).pipeline.finished == 0:
            pass
    call.cancel()
    assert first.pipeline.finished == 0
    assert now.clock_s > first.clock_s
    assert {stage.name: stage.outputs for stage in now.stages} == {"a": 2, "b": 0, "c": 2}


async def test_an_interval_that_is_too_short_is_rejected(chain: Mesh) -> None:
    call = _admin(chain).WatchPipeline(admin_pb2.WatchPipelineRequest(interval_s=0.01), timeout=10)
    assert (await error_of(anext(aiter(call)))).code.name == "INVALID_ARGUMENT"
