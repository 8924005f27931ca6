"""How long ended runs are kept."""

import asyncio
import gc
import weakref
from contextlib import aclosing

import pytest

from stagemesh.services.stage.step import run_index
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import events_of, ready_runtime, stage_config, step_spec


async def test_ended_runs_are_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "KEPT_S", 0.0)
    assert await _runs_of_two_calls() == 2


async def test_the_number_of_ended_runs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "MAX_KEPT", 0)
    assert await _runs_of_two_calls() == 2


async def test_the_bytes_of_ended_runs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "MAX_KEPT_BYTES", len("hello") - 1)
    assert await _runs_of_two_calls() == 2


async def test_a_kept_run_serves_a_later_call() -> None:
    assert await _runs_of_two_calls() == 1


async def test_many_requests_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(run_index, "MAX_KEPT", 3)
    async with ready_runtime(stage_config(steps=1)) as runtime:
        for number in range(10):
            await events_of(runtime, step_spec(f"r{number}"))
        book = runtime._runs
        assert (len(book._runs), len(book._kept), len(book._attempts)) == (3, 3, 3)


async def test_a_dropped_run_is_freed_without_the_garbage_collector() -> None:
    async with ready_runtime(stage_config(steps=1)) as runtime:
        await events_of(runtime, step_spec())
        (run,) = runtime._runs._runs.values()
        known = weakref.ref(run)
        del run
        gc.disable()
        try:
            runtime._runs.close()
            assert known() is None
        finally:
            gc.enable()


async def _runs_of_two_calls() -> int:
    """Returns how often the engine ran for a step that is called again after its end."""
    engine = GatedEngine()
    engine.gate.set()
    async with ready_runtime(engine=engine) as runtime:
        for _ in range(2):
            async with aclosing(runtime.execute(step_spec(), time_left_s=None)) as events:
                assert [event async for event in events]
            # Due timers run now.
            await asyncio.sleep(0.001)
    return len(engine.released)
