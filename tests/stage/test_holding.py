"""A replica that is drained, resumed and shut down by request, and what it says of its steps."""

import asyncio
from contextlib import aclosing

import pytest

from stagemesh.connectors.errors import NotReadyError
from stagemesh.services.stage.load import ReplicaState
from stagemesh.services.stage.reports import StepReport, page_of
from tests.stage.replicas import events_of, make_runtime, order, ready_runtime, stage_config


async def test_a_held_replica_says_so_and_takes_steps_that_come_still() -> None:
    async with ready_runtime() as runtime:
        serving: list[bool] = []
        runtime.on_serving = serving.append
        runtime.hold()
        assert (runtime.state, serving) == (ReplicaState.DRAINING, [False])
        assert await events_of(runtime, order())


async def test_release_ends_a_hold() -> None:
    async with ready_runtime() as runtime:
        serving: list[bool] = []
        runtime.on_serving = serving.append
        runtime.hold()
        runtime.hold()
        runtime.release()
        runtime.release()
        assert (runtime.state, serving) == (ReplicaState.READY, [False, True])


async def test_a_held_replica_that_shuts_down_refuses_steps_and_does_not_come_back() -> None:
    async with ready_runtime() as runtime:
        runtime.hold()
        await runtime.drain(grace_s=0)
        with pytest.raises(NotReadyError):
            await events_of(runtime, order())
        with pytest.raises(NotReadyError):
            runtime.release()


async def test_a_replica_that_loads_is_not_held() -> None:
    runtime = make_runtime()
    with pytest.raises(NotReadyError, match="loading"):
        runtime.hold()
    await runtime.close()


async def test_a_hold_counts_what_runs() -> None:
    async with ready_runtime(stage_config(steps=1000, step_s=0.01)) as runtime:
        events = runtime.execute(order("r"), time_left_s=None)
        async with aclosing(events):
            await anext(events)
            assert runtime.hold() == 1


async def test_steps_under_way_are_reported_by_request() -> None:
    async with ready_runtime(stage_config(steps=1000, step_s=0.01)) as runtime:
        runs = [runtime.execute(order(name), time_left_s=None) for name in ("one", "two")]
        for run in runs:
            await anext(run)
        reports = runtime.reports("two")
        assert [(report.request_id, report.attempt, report.started) for report in reports] == [("two", 1, True)]
        assert len(runtime.reports()) == 2
        await asyncio.gather(*(run.aclose() for run in runs))


def test_pages_of_steps_join_without_gaps() -> None:
    reports = [StepReport("r", name, 1, 0.0, started=True, inlets=(), outlets=()) for name in "cab"]
    first = page_of(reports, page_size=2, page_token="")
    second = page_of(reports, page_size=2, page_token=first.next_token)
    assert [report.step_id for report in (*first.steps, *second.steps)] == ["a", "b", "c"]
    assert second.next_token == ""
