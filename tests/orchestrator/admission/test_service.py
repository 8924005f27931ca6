"""Tests of admission through the whole orchestrator."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from stagemesh.common.errors import CancelledRequestError, DeadlineError, OverloadedError, UnavailableError
from stagemesh.orchestrator.request import lifecycle
from stagemesh.v1 import orchestrator_pb2
from tests.orchestrator.mesh import CHAIN, Mesh, ask, mesh, poll, texts
from tests.orchestrator.scripted_stage import after, hang
from tests.rpc.call_errors import error_of

if TYPE_CHECKING:
    Call = grpc.aio.UnaryStreamCall[orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse]

ONE = CHAIN + "limits: {max_in_flight: 1}\n"
ONE_WITHOUT_QUEUE = CHAIN + "limits: {max_in_flight: 1, max_queued: 0}\n"


async def _queued(chain: Mesh, **fields: str) -> "Call":
    """Returns a call that waits for a running one."""
    call = chain.stub.Generate(ask(**fields), timeout=20)
    assert (await anext(aiter(call))).HasField("queued")
    return call


async def _running(chain: Mesh) -> "Call":
    call = chain.stub.Generate(ask(request_id="running"), timeout=20)
    await chain.stages["c"].started.wait()
    return call


async def _until_queued(chain: Mesh, count: int) -> None:
    await poll(chain.describe, until=lambda description: description.queued == count, timeout_s=2)


async def test_a_request_beyond_the_limits_receives_a_retry_delay(tmp_path: Path) -> None:
    async with mesh(tmp_path, ONE_WITHOUT_QUEUE, scripts={"c": hang}) as chain:
        call = await _running(chain)
        error = await chain.failure()
        assert len(chain.stages["c"].requests) == 1
        call.cancel()
    assert (type(error), error.reason) == (OverloadedError, "ADMISSION_LIMIT")
    assert (error.retry_after_s or 0) >= 0.1


async def test_a_request_that_cannot_be_planned_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STAGE_WAIT_S", 0.2)
    async with mesh(tmp_path, ready=False) as chain:
        await chain.servers["b"].stop(grace_s=0)
        first, second = await chain.failure(request_id="r1"), await chain.failure(request_id="r1")
        described = await chain.describe()
    assert [type(error) for error in (first, second)] == [UnavailableError] * 2
    assert described.in_flight == 0
    assert [replica.planned for stage in described.stages for replica in stage.replicas] == [0, 0, 0]


async def test_a_waiting_request_receives_its_position_and_runs_in_its_turn(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with mesh(tmp_path, ONE, scripts={"c": after(gate)}) as chain:
        first = await _running(chain)
        second = chain.stub.Generate(ask(request_id="r1"), timeout=20)
        await _until_queued(chain, 1)
        gate.set()
        events = [event async for event in second]
        _ = [event async for event in first]
    assert (events[0].queued.request_id, events[0].queued.position) == ("r1", 1)
    assert events[0].queued.expected_wait_s > 0
    assert events[1].HasField("admitted")
    assert texts(events, "last") == "c done"


async def test_a_waiting_request_leaves_the_queue_when_its_client_hangs_up(tmp_path: Path) -> None:
    async with mesh(tmp_path, ONE, scripts={"c": hang}) as chain:
        running, waiting = await _running(chain), await _queued(chain)
        waiting.cancel()
        await _until_queued(chain, 0)
        running.cancel()
        await chain.until_idle()
        assert len(chain.stages["c"].requests) == 1


async def test_a_waiting_request_can_be_cancelled(tmp_path: Path) -> None:
    async with mesh(tmp_path, ONE, scripts={"c": hang}) as chain:
        running, waiting = await _running(chain), await _queued(chain, request_id="r1")
        await chain.cancel("r1")
        assert (await chain.describe()).queued == 0
        assert isinstance(await error_of(waiting), CancelledRequestError)
        running.cancel()


async def test_a_second_call_attaches_to_a_waiting_request(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with mesh(tmp_path, ONE, scripts={"c": after(gate)}) as chain:
        running = await _running(chain)
        first, second = await _queued(chain, request_id="r1"), await _queued(chain, request_id="r1")
        assert (await chain.describe()).queued == 1
        first.cancel()
        gate.set()
        events = [event async for event in second]
        _ = [event async for event in running]
        assert len(chain.stages["c"].requests) == 2
    assert texts(events, "last") == "c done"


async def test_stopping_rejects_waiting_requests_with_a_retryable_error(tmp_path: Path) -> None:
    async with mesh(tmp_path, ONE, scripts={"c": hang}, drain_s=20) as chain:
        running, waiting = await _running(chain), await _queued(chain)
        stopping = asyncio.ensure_future(chain.stop())
        error = await error_of(waiting)
        assert not running.done()
        running.cancel()
        await stopping
    assert (type(error), error.reason, error.retry_after_s) == (UnavailableError, "NOT_RUNNING", 1.0)


async def test_a_request_rejected_from_the_queue_may_use_its_id_again(tmp_path: Path) -> None:
    gate = asyncio.Event()
    limited = CHAIN + "limits: {max_in_flight: 1, max_queued: 1}\n"
    async with mesh(tmp_path, limited, scripts={"c": after(gate)}) as chain:
        running, pushed_out = await _running(chain), await _queued(chain, request_id="r1")
        other = chain.stub.Generate(ask(priority=1), timeout=20)
        assert isinstance(await error_of(pushed_out), OverloadedError)
        gate.set()
        for call in (running, other):
            _ = [event async for event in call]
        assert texts(await chain.generate(request_id="r1"), "last") == "c done"


async def test_a_request_whose_deadline_passes_in_the_queue_ends(tmp_path: Path) -> None:
    async with mesh(tmp_path, ONE, scripts={"c": hang}, max_request_s=1.5) as chain, asyncio.TaskGroup() as group:
        running = group.create_task(chain.failure(request_id="running"))
        await chain.stages["c"].started.wait()
        waiting = await _queued(chain)
        await asyncio.wait([running])
        error = await error_of(waiting)
    assert isinstance(error, DeadlineError)


async def test_limits_per_caller_apply_to_each_caller_separately(tmp_path: Path) -> None:
    limited = CHAIN + "limits: {per_caller: {max_in_flight: 1, max_queued: 0}}\n"
    async with mesh(tmp_path, limited, scripts={"c": hang}) as chain:
        calls = [chain.stub.Generate(ask(caller="a"), timeout=20)]
        await chain.stages["c"].started.wait()
        error = await chain.failure(caller="a")
        calls.append(chain.stub.Generate(ask(caller="b"), timeout=20))
        assert (await anext(aiter(calls[1]))).HasField("admitted")
        for call in calls:
            call.cancel()
    assert (type(error), error.reason) == (OverloadedError, "CALLER_LIMIT")
