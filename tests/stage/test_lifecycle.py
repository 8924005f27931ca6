"""The states of a replica: it drains, sleeps when it is idle, and waits for the release of a rolling update."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import pytest

from benchmarks.simulation import virtual_time
from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError, UnsupportedError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.conformance import until
from stagemesh.services.stage.rollout import RolloutRelease
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.v1 import stage_pb2
from tests.rpc.call_errors import raises
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import events_of, loading, ready_runtime, running_step, served_stage, stage_config, step_spec

LONG = stage_config(steps=1000, step_s=0.01)


async def test_a_draining_replica_reports_it_and_accepts_planned_steps() -> None:
    async with ready_runtime() as runtime:
        serving: list[bool] = []
        runtime.lifecycle.on_serving = serving.append
        for _ in range(2):
            runtime.lifecycle.start_drain()
        assert (runtime.lifecycle.state, serving) == (ReplicaState.DRAINING, [False])
        assert await events_of(runtime, step_spec())
        for _ in range(2):
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
    async with loading() as runtime:
        with pytest.raises(NotReadyError, match="loading"):
            runtime.lifecycle.start_drain()


async def test_a_drain_returns_the_number_of_running_steps() -> None:
    async with running_step(LONG) as (runtime, _):
        assert runtime.lifecycle.start_drain() == 1


async def test_steps_are_handed_over_after_their_time_and_new_ones_rejected(engine: GatedEngine) -> None:
    async with running_step(engine=engine) as (runtime, events):
        assert runtime.lifecycle.start_drain(move_after_s=0.0) == 1
        with raises(UnavailableError, reason="DRAINED", match="thinker-0 of stage thinker is drained"):
            [event async for event in events]
        with pytest.raises(NotReadyError):
            await events_of(runtime, step_spec("late"))
        runtime.lifecycle.end_drain()
        engine.gate.set()
        assert await events_of(runtime, step_spec("later"))


@pytest.mark.parametrize("shuts_down", [False, True])
async def test_a_drain_pauses_steps_that_can_pause(*, shuts_down: bool) -> None:
    async with running_step(LONG) as (runtime, events):
        if shuts_down:
            await runtime.lifecycle.finish_steps(grace_s=0.5)
        else:
            runtime.lifecycle.start_drain(move_after_s=0.0)
        *_, last = [event async for event in events]
        assert 0 < last.paused.checkpoint.engine_steps < 1000


async def test_a_drain_that_ends_in_time_hands_nothing_over() -> None:
    async with running_step(stage_config(steps=20, step_s=0.01)) as (runtime, events):
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
    async with ready_runtime(LONG) as runtime:
        runs = [runtime.execute(step_spec(name), time_left_s=None) for name in ("one", "two")]
        for run in runs:
            await anext(run)
        assert [(each.request_id, each.attempt, each.started) for each in runtime.reports("two")] == [("two", 1, True)]
        assert len(runtime.reports()) == 2
        await asyncio.gather(*(run.aclose() for run in runs))


@asynccontextmanager
async def _warm_runtime(*, steps: int = 4, step_s: float = 0.0) -> AsyncGenerator[StageRuntime]:
    """Yields a runtime that sleeps after one idle second, and that an orchestrator watches."""
    async with ready_runtime(replace(stage_config(steps=steps, step_s=step_s), sleep_when_idle_s=1.0)) as runtime:
        watching = asyncio.create_task(runtime.watch_engine())
        with runtime.lifecycle.rollout.verdict(RELEASED):
            yield runtime
        watching.cancel()
        await asyncio.wait([watching])


async def _until(runtime: StageRuntime, state: ReplicaState) -> None:
    await until(lambda: runtime.lifecycle.state is state, timeout_s=10)


async def test_a_replica_sleeps_after_it_has_loaded_and_is_available() -> None:
    async with _warm_runtime() as runtime:
        assert (runtime.lifecycle.state, runtime.lifecycle.is_available) == (ReplicaState.ASLEEP, True)
        with pytest.raises(NotReadyError, match="is asleep: standing by"):
            await events_of(runtime, step_spec())


async def test_a_replica_that_woke_sleeps_again_after_an_idle_time() -> None:
    async with _warm_runtime() as runtime:
        assert not await runtime.lifecycle.wake(())
        assert (runtime.lifecycle.state, bool(await events_of(runtime, step_spec()))) == (ReplicaState.READY, True)
        for state in (ReplicaState.DRAINING, ReplicaState.ASLEEP):
            await _until(runtime, state)
            assert runtime.lifecycle.is_available
        assert not await runtime.lifecycle.wake(())


async def test_a_replica_with_a_running_step_stays_awake() -> None:
    async with _warm_runtime(steps=15, step_s=0.1) as runtime:
        await runtime.lifecycle.wake(())
        running = asyncio.create_task(events_of(runtime, step_spec()))
        states = set[ReplicaState]()
        while not running.done():
            states.add(runtime.lifecycle.state)
            await asyncio.sleep(0.05)
        assert (states, bool(await running)) == ({ReplicaState.READY}, True)


async def test_a_step_that_was_planned_before_keeps_the_replica_awake() -> None:
    async with _warm_runtime() as runtime:
        await runtime.lifecycle.wake(())
        await _until(runtime, ReplicaState.DRAINING)
        assert await events_of(runtime, step_spec())
        await _until(runtime, ReplicaState.READY)


async def test_a_replica_that_is_about_to_sleep_can_shut_down() -> None:
    async with _warm_runtime() as runtime:
        await runtime.lifecycle.wake(())
        await _until(runtime, ReplicaState.DRAINING)
        runtime.lifecycle.begin_shutdown()
        await runtime.lifecycle.finish_steps(grace_s=5)
        assert (runtime.lifecycle.state, runtime.lifecycle.is_available) == (ReplicaState.DRAINING, False)


async def test_a_replica_that_an_operator_puts_to_sleep_is_not_available() -> None:
    async with _warm_runtime() as runtime:
        await runtime.lifecycle.wake(())
        await runtime.lifecycle.sleep(1, drain=False)
        assert (runtime.lifecycle.state, runtime.lifecycle.is_available) == (ReplicaState.ASLEEP, False)


async def test_an_engine_that_cannot_sleep_ends_the_start_with_a_clear_error() -> None:
    config = replace(stage_config(), sleep_when_idle_s=1.0)
    async with loading(config, engine=GatedEngine()) as runtime:
        with pytest.raises(UnsupportedError, match="cannot sleep; remove sleep_when_idle_s") as caught:
            await runtime.start()
        assert (caught.value.metadata["ability"], runtime.lifecycle.state) == ("sleep", ReplicaState.FAILED)


@pytest.mark.parametrize("idle_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_idle_time_that_is_too_short_is_rejected(idle_s: float) -> None:
    with pytest.raises(ValueError, match=r"sleep_when_idle_s is .*; it must be at least 1 s, or omitted"):
        replace(stage_config(), sleep_when_idle_s=idle_s)


Verdict: TypeAlias = "stage_pb2.RolloutVerdict.ValueType"
NONE = stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED
RELEASED, WITHHELD = stage_pb2.ROLLOUT_VERDICT_RELEASED, stage_pb2.ROLLOUT_VERDICT_WITHHELD


def _available() -> RolloutRelease:
    """Returns the release of a replica that is available."""
    release = RolloutRelease()
    release.set_available(True)
    return release


@pytest.mark.parametrize(
    ("verdicts", "ready"),
    [
        ([], False),
        ([NONE], False),
        ([RELEASED], True),
        ([WITHHELD], False),
        ([RELEASED, WITHHELD], False),
        ([RELEASED, NONE, RELEASED], True),
    ],
)
def test_one_orchestrator_must_release_a_replica_and_none_withhold_it(verdicts: list[Verdict], ready: bool) -> None:
    async def scene() -> None:
        release = _available()
        with ExitStack() as stack:
            for verdict in verdicts:
                stack.enter_context(release.verdict(verdict))
            assert release.is_ready is ready
        assert not release.is_ready

    virtual_time.run(scene())


def test_a_replica_that_was_ready_for_a_while_stays_released() -> None:
    async def scene() -> None:
        release = _available()
        with release.verdict(RELEASED):
            await asyncio.sleep(10.1)
        assert release.is_ready
        with release.verdict(WITHHELD):
            assert release.is_ready
        release.set_available(False)
        assert not release.is_ready
        release.set_available(True)
        assert release.is_ready

    virtual_time.run(scene())


def test_an_interruption_restarts_the_time_until_a_replica_stays_released() -> None:
    async def scene() -> None:
        release = _available()
        for _ in range(2):
            with release.verdict(RELEASED):
                await asyncio.sleep(9)
            assert not release.is_ready

    virtual_time.run(scene())


async def test_the_verdict_of_a_load_watch_ends_with_its_call() -> None:
    async with served_stage() as replica:
        rollout = replica.runtime.lifecycle.rollout
        changed = asyncio.Event()
        rollout.on_change = changed.set
        rollout.set_available(True)
        withholding = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(verdict=WITHHELD))
        await withholding.read()
        releasing = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(verdict=RELEASED))
        await releasing.read()
        assert not rollout.is_ready
        changed.clear()
        withholding.cancel()
        async with asyncio.timeout(10):
            await changed.wait()
        assert (rollout.is_ready, rollout.is_watched) == (True, True)
        releasing.cancel()
