"""Draining, resuming and shutting down a replica, and the reports of its steps."""

import asyncio
import math
from contextlib import aclosing

import pytest

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError
from stagemesh.common.process.stage_process import ReplicaState
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import events_of, make_runtime, ready_runtime, stage_config, step_spec


async def test_a_draining_replica_reports_it_and_accepts_planned_steps() -> None:
    async with ready_runtime() as runtime:
        serving: list[bool] = []
        runtime.lifecycle.on_serving = serving.append
        runtime.lifecycle.start_drain()
        assert (runtime.lifecycle.state, serving) == (ReplicaState.DRAINING, [False])
        assert await events_of(runtime, step_spec())


async def test_ending_a_drain_makes_the_replica_ready() -> None:
    async with ready_runtime() as runtime:
        serving: list[bool] = []
        runtime.lifecycle.on_serving = serving.append
        runtime.lifecycle.start_drain()
        runtime.lifecycle.start_drain()
        runtime.lifecycle.end_drain()
        runtime.lifecycle.end_drain()
        assert (runtime.lifecycle.state, serving) == (ReplicaState.READY, [False, True])


async def test_a_replica_that_shuts_down_cannot_end_its_drain() -> None:
    async with ready_runtime() as runtime:
        runtime.lifecycle.start_drain()
        await runtime.lifecycle.finish_steps(grace_s=0)
        with pytest.raises(NotReadyError):
            await events_of(runtime, step_spec())
        with pytest.raises(NotReadyError):
            runtime.lifecycle.end_drain()


async def test_a_loading_replica_cannot_be_drained() -> None:
    runtime = make_runtime()
    with pytest.raises(NotReadyError, match="loading"):
        runtime.lifecycle.start_drain()
    await runtime.close()


async def test_a_drain_returns_the_number_of_running_steps() -> None:
    async with ready_runtime(stage_config(steps=1000, step_s=0.01)) as runtime:
        events = runtime.execute(step_spec("r"), time_left_s=None)
        async with aclosing(events):
            await anext(events)
            assert runtime.lifecycle.start_drain() == 1


async def test_steps_are_handed_over_after_their_time_and_new_ones_rejected() -> None:
    engine = GatedEngine()
    async with ready_runtime(engine=engine) as runtime:
        events = runtime.execute(step_spec(), time_left_s=None)
        async with aclosing(events):
            await anext(events)
            assert runtime.lifecycle.start_drain(move_after_s=0.0) == 1
            with pytest.raises(UnavailableError, match="thinker-0 of stage thinker is drained") as caught:
                [event async for event in events]
        assert caught.value.reason == "DRAINED"
        with pytest.raises(NotReadyError):
            await events_of(runtime, step_spec("late"))
        runtime.lifecycle.end_drain()
        engine.gate.set()
        assert await events_of(runtime, step_spec("later"))


async def test_a_drain_pauses_steps_that_can_pause() -> None:
    async with ready_runtime(stage_config(steps=1000, step_s=0.01)) as runtime:
        events = runtime.execute(step_spec(), time_left_s=None)
        async with aclosing(events):
            await anext(events)
            runtime.lifecycle.start_drain(move_after_s=0.0)
            *_, last = [event async for event in events]
        assert 0 < last.paused.checkpoint.steps < 1000


async def test_a_shutdown_pauses_steps_at_the_end_of_its_grace() -> None:
    async with ready_runtime(stage_config(steps=1000, step_s=0.01)) as runtime:
        events = runtime.execute(step_spec(), time_left_s=None)
        async with aclosing(events):
            await anext(events)
            await runtime.lifecycle.finish_steps(grace_s=0.5)
            assert [event async for event in events][-1].HasField("paused")


async def test_a_drain_that_ends_in_time_hands_nothing_over() -> None:
    async with ready_runtime(stage_config(steps=20, step_s=0.01)) as runtime:
        events = runtime.execute(step_spec(), time_left_s=None)
        async with aclosing(events):
            await anext(events)
            runtime.lifecycle.start_drain(move_after_s=0.05)
            runtime.lifecycle.end_drain()
            assert [event async for event in events][-1].HasField("finished")


@pytest.mark.parametrize("move_after_s", [-1.0, math.nan])
async def test_an_invalid_move_time_is_rejected(move_after_s: float) -> None:
    async with ready_runtime() as runtime:
        with pytest.raises(InvalidRequestError, match="move_after_s"):
            runtime.lifecycle.start_drain(move_after_s=move_after_s)
        assert runtime.lifecycle.state is ReplicaState.READY


async def test_running_steps_are_reported_by_request() -> None:
    async with ready_runtime(stage_config(steps=1000, step_s=0.01)) as runtime:
        runs = [runtime.execute(step_spec(name), time_left_s=None) for name in ("one", "two")]
        for run in runs:
            await anext(run)
        reports = runtime.reports("two")
        assert [(report.request_id, report.attempt, report.started) for report in reports] == [("two", 1, True)]
        assert len(runtime.reports()) == 2
        await asyncio.gather(*(run.aclose() for run in runs))
