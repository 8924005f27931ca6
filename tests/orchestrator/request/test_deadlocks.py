"""Stages that wait for each other although each of them can be reached: a net below the recovery."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.request import deadlocks
from stagemesh.v1 import control_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, mesh, texts
from tests.orchestrator.scripted_stage import ACCEPTED, Response, Script, ScriptedStage, say_hello

QUICK = CHAIN.replace("}\n  b", ", stall_s: 0.05}\n  b").replace("relay}", "relay, stall_s: 0.05}")


def _report(stage: ScriptedStage, attempt: int) -> None:
    """Makes the stage report that its step of this attempt waits for input."""
    stage.controls.reports[:] = [control_pb2.StepReport(attempt=attempt, waits_for_input=True)]


async def _wait_for_each_other(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Sends the first attempt's acceptance alone. Later attempts succeed."""
    if request.attempt > 1:
        async for response in say_hello(stage, request):
            yield response
        return
    _report(stage, request.attempt)
    yield ACCEPTED
    await asyncio.Event().wait()


async def _wait_forever(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    _report(stage, request.attempt)
    yield ACCEPTED
    await asyncio.Event().wait()


async def test_stages_that_wait_for_each_other_restart(tmp_path: Path) -> None:
    async with mesh(tmp_path, QUICK, scripts=dict.fromkeys("abc", _wait_for_each_other)) as chain:
        events = await chain.generate(request_id="r1")
        attempts = {name: [request.attempt for request in stage.requests] for name, stage in chain.stages.items()}
    assert texts(events, "last") == "c done"
    assert list(attempts.values()) == [[1, 2]] * 3


async def test_stages_that_wait_for_each_other_again_and_again_fail_the_request(tmp_path: Path) -> None:
    async with mesh(tmp_path, QUICK, scripts=dict.fromkeys("abc", _wait_forever)) as chain:
        error = await chain.failure(request_id="r1")
        await chain.until_idle()
        assert [len(stage.requests) for stage in chain.stages.values()] == [3, 3, 3]
    assert (error.reason, "stages a, b, c wait for each other" in error.message) == ("REQUEST_STALLED", True)


async def test_a_stage_without_a_limit_ends_the_watch(tmp_path: Path) -> None:
    unlimited = QUICK.replace("source, stall_s: 0.05", "source, stall_s: 0")
    async with mesh(tmp_path, unlimited, scripts=dict.fromkeys("abc", _wait_forever), max_request_s=1.0) as chain:
        error = await chain.failure(request_id="r1")
        assert [len(stage.requests) for stage in chain.stages.values()] == [1, 1, 1]
    assert error.reason == "DEADLINE_EXCEEDED"


def _waiting(*, chunks: int = 1, computes: bool = False) -> control_pb2.StepReport:
    flow = control_pb2.FlowReport(edge="a->b", chunks=chunks)
    return control_pb2.StepReport(attempt=1, waits_for_input=not computes, inlets=[flow])


_PROGRESS: dict[str, Callable[[str, int], control_pb2.StepReport | None]] = {
    "one computes": lambda stage, _: _waiting(computes=stage == "b"),
    "chunks move": lambda _, number: _waiting(chunks=number),
    "one sends no reports": lambda stage, _: None if stage == "c" else _waiting(),
}


@pytest.mark.parametrize("report", _PROGRESS.values(), ids=_PROGRESS)
async def test_a_request_that_may_progress_is_left_alone(
    report: Callable[[str, int], control_pb2.StepReport | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined, numbers = asyncio.Event(), itertools.count()

    async def answer(replica: Replica, *_: object, **__: object) -> control_pb2.StepReport | None:
        if (number := next(numbers)) == 20:
            examined.set()
        return report(replica.stage, number)

    monkeypatch.setattr(deadlocks, "ask_for_report", answer)
    async with mesh(tmp_path, QUICK, scripts={name: _after(examined) for name in "abc"}) as chain:
        events = await chain.generate(request_id="r1")
        assert [len(stage.requests) for stage in chain.stages.values()] == [1, 1, 1]
    assert texts(events, "last") == "c done"


def _after(examined: asyncio.Event) -> Script:
    async def wait(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        await examined.wait()
        async for response in say_hello(stage, request):
            if response != ACCEPTED:
                yield response

    return wait
