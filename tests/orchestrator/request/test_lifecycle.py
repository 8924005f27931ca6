"""Requests that have ended: how long they can be found, and the memory that they hold."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stagemesh.common.errors import CancelledRequestError, ExistsError, InternalError, StagemeshError, UnavailableError
from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.step_stream import TakeEvent
from stagemesh.orchestrator.planning.planner import Plan, PlannedStep, Planner
from stagemesh.orchestrator.planning.replacement_replicas import Failover
from stagemesh.orchestrator.request.lifecycle import PlanRuns, RequestLifecycle, RequestRegistry
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.run import RequestRun
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.pipeline import Limits
from stagemesh.pipeline.graph import Route
from stagemesh.v1 import request_pb2, stage_pb2
from tests.orchestrator.mesh import load, mesh
from tests.orchestrator.scripted_stage import ACCEPTED, Response, ScriptedStage

LIMITS = Limits(max_in_flight=1, max_in_flight_bytes=1 << 30, max_queued=1, max_queued_bytes=1 << 30)
FAILOVER = Failover(cast("Planner", None))
"""In these tests no stage is placed again."""


def _request() -> ValidRequest:
    return ValidRequest("r", request_pb2.Input(), request_pb2.Parameters(), ())


def _life() -> RequestLifecycle:
    return _life_of(Admission(LIMITS), "r")


def _life_of(admission: Admission, request_id: str) -> RequestLifecycle:
    return RequestLifecycle(
        RequestRecord(),
        fingerprint=b"content",
        seed=7,
        admission=admission,
        admission_request=AdmissionRequest(request_id),
        failover=FAILOVER,
    )


def _nothing_to_do(runs: int) -> list[Plan]:
    return [Plan({}, Route((), (), {})) for _ in range(runs)]


def _no_replica(runs: int) -> list[Plan]:
    del runs
    raise UnavailableError("no replica")


async def _run(life: RequestLifecycle, request: ValidRequest, plan: PlanRuns) -> StagemeshError | None:
    return await life.run(request, plan, lambda record: record.size_bytes)


@pytest.mark.parametrize("plan", [_nothing_to_do, _no_replica])
async def test_an_ended_request_is_kept_without_its_input(plan: PlanRuns, no_collector: None) -> None:
    life, request = _life(), _request()
    given = weakref.ref(request)
    error = await _run(life, request, plan)
    del request
    assert given() is None
    assert life.has_run == (error is None)


@pytest.mark.parametrize("plan", [_nothing_to_do, _no_replica])
async def test_an_ended_request_without_references_is_freed_at_once(plan: PlanRuns, no_collector: None) -> None:
    life = _life()
    await _run(life, _request(), plan)
    life.stop(CancelledRequestError("too late"))
    ended = weakref.ref(life)
    del life
    assert ended() is None


async def test_a_request_stopped_in_the_queue_is_freed_at_once(no_collector: None) -> None:
    admission = Admission(LIMITS)
    lives = [_life_of(admission, name) for name in "ab"]
    waiting = lives.pop()
    waiting.stop(CancelledRequestError("by somebody"))
    error = await _run(waiting, _request(), _nothing_to_do)
    ended = weakref.ref(waiting)
    del waiting
    assert (str(error), ended()) == ("by somebody", None)


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_cancelled_task_releases_its_admission(admitted: bool) -> None:
    admission = Admission(LIMITS)
    first, second = (_life_of(admission, name) for name in "ab")
    task = asyncio.ensure_future(_run(second, _request(), _nothing_to_do))
    await asyncio.sleep(0)
    if admitted:
        await _run(first, _request(), _nothing_to_do)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if not admitted:
        await _run(first, _request(), _nothing_to_do)
    assert (admission.loads.running.requests, admission.loads.waiting.requests) == (0, 0)


class _FailingClient:
    async def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> None:
        del timeout_s, take
        raise InternalError(f"{request.request_id} does not work")


async def test_a_failed_run_without_references_is_freed_at_once(tmp_path: Path, no_collector: None) -> None:
    stage = load(tmp_path).stages["a"]
    replica = SimpleNamespace(
        name="a-0",
        stage="a",
        endpoint="nowhere",
        end_cause=None,
        on_end=lambda _: lambda: None,
        client=_FailingClient(),
    )
    step = PlannedStep(stage, cast("Replica", replica), lambda: None)
    plan, errors = Plan({"a": step}, Route((stage,), (), {})), list[StagemeshError]()
    run = RequestRun(_request(), plan, RequestRecord(), failover=FAILOVER, timeout_s=10, failed=errors.append)
    error = await run.run()
    assert errors == [error]
    ended = weakref.ref(run)
    del run
    assert (str(error), ended()) == ("r does not work", None)


@pytest.mark.usefixtures("no_collector")
async def test_a_request_that_is_no_longer_kept_is_freed_at_once(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        await chain.generate(request_id="r1")
        await chain.until_idle()
        assert _found(RequestRecord) == 1
        _forget_ended()
        await asyncio.sleep(0)
        assert _found(RequestRecord) == 0


async def test_the_timeline_of_a_failed_request_refers_to_none_of_its_outputs(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"c": _fail}) as chain:
        for number in range(4):
            await chain.failure(request_id=f"r{number}")
        await chain.until_idle()
        assert _found(RequestRecord) == 4
        _forget_ended()
        gc.collect()
        assert _found(RequestRecord) == 0


async def _fail(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    del stage, request
    yield ACCEPTED
    raise InternalError("out of luck")


def _found(kind: type[object]) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def _forget_ended() -> None:
    """Drops the requests that have ended, as their timers would."""
    for each in gc.get_objects():
        if type(each) is RequestRegistry:
            each.clear()


def _known(*, size_bytes: int = 0) -> RequestLifecycle:
    limits = Limits(max_in_flight=1, max_in_flight_bytes=1 << 30, max_queued=1, max_queued_bytes=1 << 30)
    record = RequestRecord()
    record.size_bytes = size_bytes
    return RequestLifecycle(
        record,
        fingerprint=b"content",
        seed=7,
        admission=Admission(limits),
        admission_request=AdmissionRequest("r"),
        failover=Failover(cast("Planner", None)),
    )


async def test_an_ended_request_can_be_found_for_a_while() -> None:
    table = RequestRegistry(keep_s=60)
    table.add("r1", known := _known())
    table.end("r1")
    assert table.find("r1") is known
    assert not table.running
    table.clear()


async def test_an_ended_request_is_dropped_in_time() -> None:
    table = RequestRegistry(keep_s=0)
    table.add("r1", _known())
    table.end("r1")
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, later.set)
    await later.wait()
    assert table.find("r1") is None


async def test_only_an_ended_request_can_be_discarded() -> None:
    table = RequestRegistry()
    for request_id in ("r1", "r2"):
        table.add(request_id, _known())
    table.end("r1")
    for request_id in ("r1", "r2", "unknown"):
        table.discard_ended(request_id)
    assert (table.find("r1") is None, table.find("r2") is None) == (True, False)


async def test_the_oldest_requests_are_dropped_if_too_much_is_kept() -> None:
    table = RequestRegistry(keep_bytes=100)
    for request_id in ("r1", "r2", "r3"):
        table.add(request_id, _known(size_bytes=40))
        table.end(request_id)
    assert [table.find(request_id) is None for request_id in ("r1", "r2", "r3")] == [True, False, False]
    table.clear()


async def test_other_content_under_one_id_is_rejected() -> None:
    table = RequestRegistry()
    table.add("r1", _known())
    with pytest.raises(ExistsError, match="already exists with different content"):
        table.find_same("r1", b"other content")
