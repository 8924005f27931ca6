"""A replica that runs steps, without gRPC, and how long it keeps ended runs."""

import asyncio
import weakref
from contextlib import aclosing
from itertools import accumulate

import pytest

from stagemesh.common import errors
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.conformance import until
from stagemesh.services.stage.lifecycle import PLANNED_S
from stagemesh.services.stage.step import run, run_index
from stagemesh.v1 import request_pb2, stage_pb2
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import attached, events_of, loading, ready_runtime, running_step, stage_config, step_spec


async def test_the_events_of_a_step_are_in_order() -> None:
    async with ready_runtime(stage_config(steps=3)) as runtime:
        events = await events_of(runtime, step_spec())
    assert events[0] == stage_pb2.ExecuteStepResponse(accepted=stage_pb2.StepAccepted(queue_position=0))
    parts = [event.output for event in events if event.HasField("output")]
    assert [part.position for part in parts] == list(
        accumulate((len(part.text.encode()) for part in parts[:-1]), initial=0)
    )
    assert (len(parts), parts[-1].finish.reason) == (4, request_pb2.FINISH_REASON_END)
    assert events[-1].finished.usage.engine_steps == 3


async def test_timings_increase() -> None:
    async with ready_runtime(stage_config(step_s=0.01)) as runtime:
        times = (await events_of(runtime, step_spec()))[-1].finished.timings
    assert times.HasField("first_output_s")
    assert 0 <= times.started_s < times.first_output_s < times.finished_s < 5


async def test_only_requested_tensors_are_streamed() -> None:
    async with ready_runtime() as runtime:
        assert not [each for each in await events_of(runtime, step_spec(streamed=())) if each.HasField("output")]


async def test_an_ended_step_does_not_run_again(engine: GatedEngine) -> None:
    engine.gate.set()
    async with ready_runtime(engine=engine) as runtime:
        with pytest.raises(errors.NotFoundError, match="start a new attempt"):
            await events_of(runtime, step_spec(attach_only=True))
        first = await events_of(runtime, step_spec())
        assert first == await events_of(runtime, step_spec(attach_only=True)) == await events_of(runtime, step_spec())
    assert engine.released == ["r"]


async def test_the_engine_releases_a_step_without_callers(engine: GatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ABANDON_S", 0.0)
    async with ready_runtime(engine=engine) as runtime:
        async with attached(runtime):
            async with aclosing(runtime.execute(step_spec(), time_left_s=None)) as others:
                await anext(others)
            assert engine.running == ["r"]
        await until(lambda: bool(engine.released), timeout_s=10)
        with pytest.raises(errors.CancelledRequestError, match="every caller of the step has disconnected"):
            await events_of(runtime, step_spec())
        assert engine.released == ["r"]


async def test_a_caller_that_leaves_early_stops_a_step(engine: GatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ABANDON_S", 0.0)
    async with ready_runtime(engine=engine) as runtime:
        async with aclosing(runtime.execute(step_spec(), time_left_s=None)) as events:
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        await until(lambda: bool(engine.released), timeout_s=10)
        with pytest.raises(errors.CancelledRequestError):
            await events_of(runtime, step_spec())
        assert engine.running == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad luck"), errors.InternalError),
        (errors.UnavailableError("a peer is gone"), errors.UnavailableError),
    ],
)
async def test_an_engine_error_names_stage_and_replica(
    engine: GatedEngine, error: Exception, expected: type[errors.StagemeshError]
) -> None:
    engine.error = error
    engine.gate.set()
    async with ready_runtime(engine=engine) as runtime:
        expected_text = str(error) if isinstance(error, errors.StagemeshError) else "of stage thinker raised ValueError"
        with pytest.raises(expected, match=expected_text) as caught:
            await events_of(runtime, step_spec())
    assert caught.value.metadata == {"stage": "thinker", "replica": "thinker-0", "request_id": "r"}


async def test_a_later_caller_extends_the_deadline(engine: GatedEngine) -> None:
    async with ready_runtime(engine=engine) as runtime, asyncio.TaskGroup() as group:
        async with attached(runtime, time_left_s=1.0):
            long = group.create_task(events_of(runtime, step_spec()))
            await asyncio.sleep(1.2)
            engine.gate.set()
        assert (await long)[-1].HasField("finished")


async def test_cancel_when_left_spares_a_step_that_another_caller_follows(engine: GatedEngine) -> None:
    async with ready_runtime(engine=engine) as runtime:
        async with attached(runtime):
            async with attached(runtime):
                pass
            assert (await runtime.cancel("r", attempt=0, reason="it left", when_left=True)).stopped == 0
            assert engine.running == ["r"]
            cancelling = asyncio.create_task(runtime.cancel("r", attempt=0, reason="it left", when_left=True))
        assert (await cancelling).stopped == 1
        assert engine.released == ["r"]


async def test_a_second_stop_does_not_interrupt_the_first(engine: GatedEngine) -> None:
    async with running_step(engine=engine) as (runtime, events):
        first = asyncio.ensure_future(runtime.cancel("r", attempt=0, reason="first"))
        # After one iteration of the event loop the engine is in its last step.
        await asyncio.sleep(0)
        await asyncio.gather(first, runtime.cancel("r", attempt=0, reason="second"))
        assert engine.released == ["r"]
        with pytest.raises(errors.CancelledRequestError, match="first"):
            [event async for event in events]


async def test_shutdown_lets_steps_finish_and_accepts_planned_ones_meanwhile(engine: GatedEngine) -> None:
    async with ready_runtime(engine=engine) as runtime, asyncio.TaskGroup() as group:
        running = group.create_task(events_of(runtime, step_spec("a")))
        while not engine.running:
            await asyncio.sleep(0)
        draining = group.create_task(runtime.lifecycle.finish_steps(grace_s=5))
        await asyncio.sleep(0)
        planned = group.create_task(events_of(runtime, step_spec("b")))
        await asyncio.sleep(0)
        assert runtime.lifecycle.state is ReplicaState.DRAINING
        engine.gate.set()
        await draining
        assert (await running)[-1].HasField("finished")
        assert (await planned)[-1].HasField("finished")
        with pytest.raises(errors.NotReadyError, match="draining"):
            await events_of(runtime, step_spec("c"))


async def test_an_idle_replica_waits_for_planned_steps_while_an_orchestrator_watches_it() -> None:
    async with ready_runtime() as runtime:
        with runtime.lifecycle.rollout.verdict(stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED):
            draining = asyncio.create_task(runtime.lifecycle.finish_steps(grace_s=60))
            await asyncio.sleep(0.1)
            assert (await events_of(runtime, step_spec()))[-1].HasField("finished")
            began_s = asyncio.get_running_loop().time()
            await draining
            assert asyncio.get_running_loop().time() - began_s < PLANNED_S
        with pytest.raises(errors.NotReadyError, match="draining"):
            await events_of(runtime, step_spec("late"))


async def test_an_idle_replica_that_is_not_watched_ends_at_once() -> None:
    async with ready_runtime() as runtime:
        began_s = asyncio.get_running_loop().time()
        await runtime.lifecycle.finish_steps(grace_s=60)
        assert asyncio.get_running_loop().time() - began_s < PLANNED_S / 2


async def test_shutdown_stops_steps_that_do_not_finish(engine: GatedEngine) -> None:
    async with running_step(engine=engine) as (runtime, events):
        await runtime.lifecycle.finish_steps(grace_s=0.01)
        with pytest.raises(errors.UnavailableError, match="thinker-0 is shutting down"):
            [event async for event in events]
    assert engine.closed


async def test_a_dead_engine_fails_its_steps_with_the_cause(engine: GatedEngine) -> None:
    async with running_step(engine=engine) as (runtime, events):
        engine.death.set()
        with pytest.raises(errors.UnavailableError, match="the gate fell down"):
            await runtime.watch_engine()
        with pytest.raises(errors.UnavailableError, match="stage thinker: the gate fell down") as caught:
            [event async for event in events]
        assert caught.value.metadata["request_id"] == "r"
        assert (runtime.lifecycle.state, runtime.lifecycle.detail) == (ReplicaState.FAILED, "the gate fell down")


async def test_a_load_failure_is_reported_to_later_calls(engine: GatedEngine) -> None:
    engine.load_error = ValueError("no such weights")
    message = "ValueError: no such weights"
    async with loading(engine=engine) as runtime:
        with pytest.raises(errors.NotReadyError, match=f"engine fake of stage thinker failed to load: {message}"):
            await runtime.start()
        assert (runtime.lifecycle.state, runtime.lifecycle.detail) == (ReplicaState.FAILED, message)


@pytest.mark.parametrize(("limit", "value"), [("KEPT_S", 0.0), ("MAX_KEPT", 0), ("MAX_KEPT_BYTES", len("hello") - 1)])
async def test_an_ended_run_is_dropped_beyond_each_limit(
    engine: GatedEngine, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(run_index, limit, value)
    engine.gate.set()
    async with ready_runtime(engine=engine) as runtime:
        for _ in range(2):
            await events_of(runtime, step_spec())
            # Due timers run now.
            await asyncio.sleep(0.001)
    assert engine.released == ["r", "r"]


async def test_many_requests_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(run_index, "MAX_KEPT", 3)
    async with ready_runtime(stage_config(steps=1)) as runtime:
        for number in range(10):
            await events_of(runtime, step_spec(f"r{number}"))
        book = runtime._runs
        assert (len(book._runs), len(book._kept), len(book._attempts)) == (3, 3, 3)


async def test_a_dropped_run_is_freed_without_the_garbage_collector(no_collector: None) -> None:
    async with ready_runtime(stage_config(steps=1)) as runtime:
        await events_of(runtime, step_spec())
        (run,) = runtime._runs._runs.values()
        known = weakref.ref(run)
        del run
        runtime._runs.close()
        assert known() is None
