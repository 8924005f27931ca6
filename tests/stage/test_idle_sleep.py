"""Replicas that sleep when they are idle."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from stagemesh.common.errors import NotReadyError, UnsupportedError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.fake.engine import FakeEngine
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.v1.stage_pb2 import ROLLOUT_VERDICT_RELEASED
from tests.stage.replicas import events_of, make_runtime, ready_runtime, stage_config, step_spec


@asynccontextmanager
async def _warm_runtime(*, steps: int = 4, step_s: float = 0.0) -> AsyncGenerator[StageRuntime]:
    """Yields a runtime that sleeps after one idle second, and that an orchestrator watches."""
    async with ready_runtime(replace(stage_config(steps=steps, step_s=step_s), sleep_when_idle_s=1.0)) as runtime:
        watching = asyncio.create_task(runtime.watch_engine())
        with runtime.lifecycle.rollout.verdict(ROLLOUT_VERDICT_RELEASED):
            yield runtime
        watching.cancel()
        await asyncio.wait([watching])


async def _until(runtime: StageRuntime, state: ReplicaState) -> None:
    async with asyncio.timeout(10):
        while runtime.lifecycle.state is not state:
            await asyncio.sleep(0.01)


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


class _SleeplessEngine(FakeEngine):
    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities()


async def test_an_engine_that_cannot_sleep_ends_the_start_with_a_clear_error() -> None:
    config = replace(stage_config(), sleep_when_idle_s=1.0)
    runtime = make_runtime(config, engine=_SleeplessEngine(config))
    with pytest.raises(UnsupportedError, match="cannot sleep; remove sleep_when_idle_s") as caught:
        await runtime.start()
    assert (caught.value.metadata["ability"], runtime.lifecycle.state) == ("sleep", ReplicaState.FAILED)
    await runtime.close()


@pytest.mark.parametrize("idle_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_idle_time_that_is_too_short_is_rejected(idle_s: float) -> None:
    with pytest.raises(ValueError, match=r"sleep_when_idle_s is .*; it must be at least 1 s, or omitted"):
        replace(stage_config(), sleep_when_idle_s=idle_s)
