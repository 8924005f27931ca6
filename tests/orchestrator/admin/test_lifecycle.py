"""Tests of drains, resumes and the directory, without a server."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from google.protobuf.message import Message

from stagemesh.common.errors import DeadlineError, StagemeshError, UnavailableError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.inspection import Inspector
from stagemesh.orchestrator.admin.lifecycle import Lifecycle, count_running
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.orchestrator.request.lifecycle import RequestRegistry
from stagemesh.orchestrator.request.timeline import History, Timeline
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.server import Server
from stagemesh.v1 import control_pb2, control_pb2_grpc, stage_pb2
from tests.orchestrator.replicas import ready_replica

if TYPE_CHECKING:
    from stagemesh.orchestrator.orchestrator import Orchestrator


class Controls:
    """A replica's client for control calls, which is always ready."""

    def __init__(self, error: StagemeshError | None = None) -> None:
        self.on_asked: Callable[[], object] = lambda: None
        self._error = error

    async def control(self, request: Message, response: type[Message], *, timeout_s: float) -> Message:
        self.on_asked()
        if self._error is not None:
            raise self._error
        return response()

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        return stage_pb2.DescribeResponse(state=stage_pb2.REPLICA_STATE_READY)


@pytest.fixture
def fleet(pipeline: Pipeline) -> Fleet:
    return Fleet(pipeline, [])


@pytest.fixture
def directory(pipeline: Pipeline, fleet: Fleet) -> Directory:
    return Directory(pipeline, fleet)


def _replica(fleet: Fleet, pipeline: Pipeline, name: str, error: StagemeshError | None = None) -> Replica:
    replica = ready_replica(name, pipeline, registry=fleet.registry)
    replica.client = cast("ReplicaClient", Controls(error))
    return replica


def test_replicas_are_listed_by_name_in_any_order_of_arrival(fleet: Fleet, directory: Directory) -> None:
    for name in ("b-10", "b-2", "a-1", "a-0"):
        _replica(fleet, directory.pipeline, name)
    assert [replica.name for replica in directory.replicas] == ["a-0", "a-1", "b-2", "b-10"]


def test_of_two_replicas_with_one_name_the_serving_one_is_found(fleet: Fleet, directory: Directory) -> None:
    former, now = (_replica(fleet, directory.pipeline, "b-0") for _ in range(2))
    former.observe(ReplicaState.UNREACHABLE, "gone")
    assert directory.target("b-0") == [now]


async def test_resuming_a_rejected_replica_does_not_make_it_ready(fleet: Fleet, directory: Directory) -> None:
    replica = _replica(fleet, directory.pipeline, "b-0")
    replica.observe(ReplicaState.FAILED, "refused: its generation is x, expected y")
    await Lifecycle(directory).resume("b-0")
    assert replica.state is ReplicaState.FAILED
    assert not fleet.registry.has_ready("b")


async def test_a_stage_is_resumed_even_if_one_replica_fails(fleet: Fleet, directory: Directory) -> None:
    replicas = [
        _replica(fleet, directory.pipeline, "b-0", UnavailableError("b-0 is gone")),
        _replica(fleet, directory.pipeline, "b-1"),
    ]
    for replica in replicas:
        replica.observe(ReplicaState.DRAINING, "")
    with pytest.raises(UnavailableError, match="b-0 is gone"):
        await Lifecycle(directory).resume("b")
    assert [replica.state for replica in replicas] == [ReplicaState.DRAINING, ReplicaState.READY]


@pytest.mark.parametrize(("error", "running"), [(DeadlineError("too slow"), 1), (UnavailableError("gone"), 0)])
async def test_a_replica_that_does_not_answer_in_time_counts_as_busy(
    fleet: Fleet, directory: Directory, error: StagemeshError, running: int
) -> None:
    assert await count_running(_replica(fleet, directory.pipeline, "b-0", error)) == running


async def test_an_attempt_that_starts_during_an_inspection_is_ignored(fleet: Fleet, directory: Directory) -> None:
    timeline = Timeline("r")
    notes = timeline.begin("b", replica="b-0", attempt=1)
    notes.note_sent()
    notes.note_accepted(stage_pb2.StepAccepted())
    history = History()
    history.add(timeline)
    controls = cast("Controls", _replica(fleet, directory.pipeline, "b-0").client)
    controls.on_asked = lambda: timeline.begin("b", replica="b-1", attempt=2)
    orchestrator = cast("Orchestrator", SimpleNamespace(requests=RequestRegistry(), history=history))
    inspected = await Inspector(orchestrator, directory).inspect("r")
    assert [step.attempt for step in inspected.steps] == [1]


async def test_the_number_of_concurrent_probes_is_limited(fleet: Fleet, directory: Directory) -> None:
    under_way, most = 0, 0

    async def answer(*_: object, **__: object) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        raise UnavailableError("the replica is unreachable")

    for name in [f"{stage}-{number}" for stage in "ab" for number in range(10)]:
        _replica(fleet, directory.pipeline, name).client = cast("ReplicaClient", SimpleNamespace(probe_edge=answer))
    links = await directory.probe_edge(directory.edge("a->b"))
    assert len([link for link in links if link.error is not None]) == 100
    assert most < 100


async def test_a_call_over_a_closed_connection_reports_an_unreachable_replica() -> None:
    client = ReplicaClient(stage="b", replica="b-0", endpoint="127.0.0.1:1")
    await client.close()
    for call in (
        anext(client.watch_load(stage_pb2.ROLLOUT_VERDICT_RELEASED)),
        client.describe(timeout_s=5),
        client.control(control_pb2.ListStepsRequest(), control_pb2.ListStepsResponse, timeout_s=5),
        client.cancel(stage_pb2.CancelStepRequest(), timeout_s=5),
        client.probe_edge("b->c", ConsumerAddress("c-0", "127.0.0.1:2"), "auto", timeout_s=5),
    ):
        with pytest.raises(UnavailableError, match="no longer connected"):
            await call


class SilentControls(control_pb2_grpc.StageControlServiceServicer):
    """A control service that never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def ListSteps(self, request: object, context: object) -> control_pb2.ListStepsResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it never answers")


@asynccontextmanager
async def _asking() -> AsyncGenerator[tuple[ReplicaClient, asyncio.Task[control_pb2.ListStepsResponse]]]:
    """Yields a call that has reached its replica, and the call's client."""
    server, controls = Server("127.0.0.1:0"), SilentControls()  # type: ignore[abstract]
    control_pb2_grpc.add_StageControlServiceServicer_to_server(controls, server.grpc)
    endpoint = f"127.0.0.1:{await server.start()}"
    try:
        client = ReplicaClient(stage="b", replica="b-0", endpoint=endpoint)
        asking = asyncio.create_task(
            client.control(control_pb2.ListStepsRequest(), control_pb2.ListStepsResponse, timeout_s=20)
        )
        await asyncio.wait_for(controls.asked.wait(), 10)
        yield client, asking
        await client.close()
    finally:
        await server.stop(grace_s=0)


async def test_closing_a_connection_fails_its_calls_without_cancelling_their_tasks() -> None:
    async with _asking() as (client, asking):
        await client.close()
        with pytest.raises(UnavailableError, match="no longer connected"):
            await asking


async def test_a_cancelled_call_does_not_report_an_unreachable_replica() -> None:
    async with _asking() as (_, asking):
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
