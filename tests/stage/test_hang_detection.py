"""A replica whose engine hangs or dies ends itself; a replica that waits for others, or is slow, does not."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from pydantic import JsonValue

from benchmarks.simulation import virtual_time
from stagemesh.common.errors import DeadlineError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.rpc.server import Server
from stagemesh.services.engines.base import EngineEvent, Task, Usage
from stagemesh.services.stage.process import work
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.step_hangs import StallWatch
from tests.rpc.call_errors import raises
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import events_of, loading, ready_runtime, stage_config, step_spec

_numbers = itertools.count()


@dataclass(eq=False)
class _Run:
    """The attributes of a `StepRun` that hang detection reads."""

    computes: bool = True
    event_count: int = 0
    priority: int = 0
    number: int = field(default_factory=lambda: next(_numbers))


def _watch(runs: list[_Run], *, on_hung: Callable[[_Run], None] = lambda _: None) -> StallWatch:
    return StallWatch(cast("Any", lambda: runs), stall_s=10.0, on_hung=cast("Any", on_hung))


def _stalled(runs: list[_Run], life: Callable[[], Coroutine[object, object, None]]) -> float | None:
    """Returns when a watch with a limit of 10 s reports a hang while `life` changes the runs; None for never."""

    async def main() -> float | None:
        watching = asyncio.create_task(_watch(runs).wait_stalled())
        living = asyncio.create_task(life())
        await asyncio.wait([watching, living], return_when=asyncio.FIRST_COMPLETED)
        stalled_s = asyncio.get_running_loop().time() if watching.done() else None
        for task in (watching, living):
            task.cancel()
        return stalled_s

    return virtual_time.run(main())


async def _an_hour() -> None:
    await asyncio.sleep(3600.0)


def test_a_silent_run_hangs() -> None:
    stalled_s = _stalled([_Run()], _an_hour)
    assert stalled_s is not None
    assert 10.0 <= stalled_s <= 11.0


def test_runs_that_wait_for_others_do_not_hang() -> None:
    assert _stalled([_Run(computes=False), _Run(computes=False)], _an_hour) is None


@pytest.mark.parametrize("computes", [True, False], ids=["computing", "between two waits for input"])
def test_one_progressing_run_shows_that_the_engine_works(*, computes: bool) -> None:
    runs = [_Run(computes=computes), _Run()]

    async def life() -> None:
        for _ in range(100):
            await asyncio.sleep(9.0)
            runs[0].event_count += 1

    assert _stalled(runs, life) is None


def test_an_ended_run_counts_as_progress() -> None:
    runs = [_Run()]

    async def life() -> None:
        for _ in range(100):
            await asyncio.sleep(8.0)
            runs.append(_Run())
            await asyncio.sleep(0.6)
            runs.pop(0)

    assert _stalled(runs, life) is None


def test_a_new_run_does_not_hide_a_hang() -> None:
    runs = [_Run()]

    async def life() -> None:
        while True:
            await asyncio.sleep(3.0)
            runs.append(_Run())

    stalled_s = _stalled(runs, life)
    assert stalled_s is not None
    assert stalled_s <= 11.0


def _hung(runs: list[_Run], *, ends: bool = True, per_s: int = 10) -> tuple[list[_Run], str]:
    """Returns the runs that are reported to hang alone, and then the cause for which the engine is reported to hang.

    In the first minute only the last run makes progress, in the second minute none does.
    """
    hung: list[_Run] = []

    def on_hung(run: _Run) -> None:
        hung.append(run)
        if ends:
            runs.remove(run)

    async def main() -> str:
        watching = asyncio.create_task(_watch(runs, on_hung=on_hung).wait_stalled())
        for _ in range(60):
            await asyncio.wait([watching], timeout=1.0)
            runs[-1].event_count += per_s
        await asyncio.wait([watching], timeout=60.0)
        cause = watching.result() if watching.done() else ""
        watching.cancel()
        return cause

    return hung, virtual_time.run(main())


@pytest.mark.parametrize("event_count", [0, 3])
def test_a_run_that_later_ones_overtake_is_reported_once(event_count: int) -> None:
    hung, cause = _hung([stuck := _Run(event_count=event_count), _Run(computes=False, event_count=1), _Run()])
    assert hung == [stuck]
    assert "1 step has its input, but none has made progress" in cause


def test_an_engine_that_keeps_a_stopped_run_hangs() -> None:
    hung, cause = _hung([_Run(), _Run()], ends=False)
    assert len(hung) == 1
    assert "a stopped step has not ended" in cause


def test_a_queued_run_does_not_hang() -> None:
    gets_on = _Run()
    assert _hung([_Run(), gets_on], per_s=1)[0] == []
    assert _hung([_Run(priority=1), _Run(), gets_on], per_s=0)[0] == []
    assert _hung([_Run(priority=-1), _Run()])[0] == []
    # Later runs wait for the runs before them.
    assert _hung([later := _Run(), gets_on])[0] == []
    assert later.number > gets_on.number


def test_a_stopped_run_does_not_count_as_progress() -> None:
    """An engine without progress is detected although its runs are stopped one after the other."""
    runs = [_Run() for _ in range(4)]

    async def main() -> float:
        watching = asyncio.create_task(_watch(runs, on_hung=runs.remove).wait_stalled())
        for _ in range(8):
            await asyncio.sleep(1.0)
            runs[-1].event_count += 100
            for run in runs[:-1]:
                run.event_count += 1
        for run in runs[1:-1]:
            run.event_count += 100
        assert "hangs" in await watching
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) <= 8.0 + 11.0


async def test_a_step_that_hangs_alone_fails_as_unavailable() -> None:
    hangs: JsonValue = [{"kind": "hang", "after_steps": 2, "attempts": 1}]
    config = replace(stage_config(), stall_s=1.0, options={"steps": 10_000, "step_s": 0.01, "faults": hangs})
    other = step_spec("other", attempt=2)
    async with ready_runtime(config) as runtime, asyncio.timeout(20):
        watching = asyncio.create_task(runtime.watch_engine())
        hanging = asyncio.create_task(events_of(runtime, step_spec()))
        await until_running(runtime, 1)
        gets_on = asyncio.create_task(events_of(runtime, replace(other, task=replace(other.task, attempt=2))))
        with raises(UnavailableError, reason="STEP_HANGS", match="has made progress on later steps"):
            await hanging
        assert not watching.done()
        for task in (watching, gets_on):
            task.cancel()
        await asyncio.gather(watching, gets_on, return_exceptions=True)


async def until_running(runtime: StageRuntime, count: int) -> None:
    while runtime.load().running < count:
        await asyncio.sleep(0.01)


async def test_an_engine_that_hangs_has_died() -> None:
    config = replace(stage_config(steps=3), stall_s=0.4, options={"steps": 3, "faults": [{"kind": "hang"}]})
    async with ready_runtime(config) as runtime, asyncio.timeout(10):
        asking = asyncio.create_task(events_of(runtime, step_spec()))
        with raises(UnavailableError, reason="ENGINE_DIED", match="the engine hangs: 1 step has its input"):
            await runtime.watch_engine()
        with pytest.raises(UnavailableError, match="the engine hangs"):
            await asking


class StuckEngine(FakeEngine):
    """Ignores the abort of a task until `release` is set."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.release = asyncio.Event()

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        try:
            await asyncio.Event().wait()
            yield Usage(engine_steps=len(task.request_id))
        finally:
            await self.release.wait()


async def test_an_engine_that_ignores_an_abort_has_died_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.services.stage.runtime._RELEASE_S", 0.05)
    config = replace(stage_config(), stall_s=0.4)
    engine = StuckEngine(config)
    async with ready_runtime(engine=engine, config=config) as runtime, asyncio.timeout(10):
        asking = asyncio.create_task(events_of(runtime, step_spec()))
        with pytest.raises(UnavailableError, match="the engine hangs"):
            await runtime.watch_engine()
        engine.release.set()
        with pytest.raises(UnavailableError):
            await asking


async def test_a_lone_hanging_step_ends_at_its_deadline() -> None:
    hangs: JsonValue = [{"kind": "hang", "after_steps": 1}]
    config = replace(stage_config(), stall_s=300.0, options={"steps": 3, "faults": hangs})
    async with ready_runtime(config) as runtime, asyncio.timeout(5):
        watching = asyncio.create_task(runtime.watch_engine())
        with pytest.raises(DeadlineError, match="the deadline passed while the step ran"):
            [event async for event in runtime.execute(step_spec(), time_left_s=0.2)]
        assert runtime.load().running == 0
        assert not watching.done()
        watching.cancel()


async def test_a_deadline_holds_although_the_engine_ignores_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.services.stage.step.run.ABORT_S", 0.1)
    config = replace(stage_config(), stall_s=300.0)
    engine = StuckEngine(config)
    async with ready_runtime(engine=engine, config=config) as runtime, asyncio.timeout(5):
        with pytest.raises(DeadlineError, match="the deadline passed while the step ran"):
            [event async for event in runtime.execute(step_spec(), time_left_s=0.1)]
        # The engine still has the task, so the step still counts as running and is watched for a hang.
        (report,) = runtime.reports()
        assert report.step_id == step_spec().step_id
        engine.release.set()
        while runtime.reports():
            await asyncio.sleep(0.01)


async def test_an_engine_that_keeps_a_task_beyond_its_deadline_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.services.stage.step.run.ABORT_S", 0.05)
    monkeypatch.setattr("stagemesh.services.stage.runtime._RELEASE_S", 0.05)
    config = replace(stage_config(), stall_s=0.4)
    engine = StuckEngine(config)
    async with ready_runtime(engine=engine, config=config) as runtime, asyncio.timeout(10):
        watching = asyncio.create_task(runtime.watch_engine())
        with pytest.raises(DeadlineError):
            [event async for event in runtime.execute(step_spec(), time_left_s=0.1)]
        with pytest.raises(UnavailableError, match="the engine hangs"):
            await watching
        engine.release.set()


async def test_a_slow_step_within_the_limit_does_not_hang() -> None:
    config = replace(stage_config(steps=4, step_s=0.3), stall_s=1.0)
    async with ready_runtime(config) as runtime, asyncio.timeout(10):
        watching = asyncio.create_task(runtime.watch_engine())
        await events_of(runtime, step_spec())
        assert not watching.done()
        watching.cancel()


@pytest.mark.parametrize(
    ("loads", "kind", "reason", "said"),
    [
        (True, UnavailableError, "ENGINE_DIED", "stage thinker: the gate fell down"),
        (False, NotReadyError, "LOAD_FAILED", "no such weights"),
    ],
)
async def test_a_dead_engine_ends_the_service(
    engine: GatedEngine, loads: bool, kind: type[StagemeshError], reason: str, said: str
) -> None:
    engine.load_error = None if loads else ValueError("no such weights")
    if loads:
        engine.death.set()
    async with loading(engine=engine) as runtime:
        with raises(kind, reason=reason, match=said):
            await work(runtime, Server("127.0.0.1:0"), asyncio.Event())


async def test_a_replica_drained_during_its_start_is_never_serving() -> None:
    class DrainedEngine(GatedEngine):
        """An engine during whose loading an operator drains the replica."""

        async def start(self, report: Callable[[str], None]) -> None:
            await super().start(report)
            asyncio.get_running_loop().call_soon(runtime.lifecycle.start_drain)

    class SeenServer(Server):
        def set_health(self, *services: str, serving: bool) -> None:
            seen.update(dict.fromkeys(services, serving))

    seen, served = dict[str, bool](), list[bool]()
    engine = DrainedEngine()
    engine.death.set()
    async with loading(engine=engine) as runtime:
        runtime.lifecycle.on_serving = served.append
        with pytest.raises(UnavailableError):
            await work(runtime, SeenServer("127.0.0.1:0"), asyncio.Event())
    assert seen == {"stagemesh.v1.StageControlService": True}
    assert set(served) == {False}


async def test_a_stop_during_loading_closes_the_engine(engine: GatedEngine) -> None:
    stopping = asyncio.Event()
    stopping.set()
    async with loading(engine=engine) as runtime:
        await work(runtime, Server("127.0.0.1:0"), stopping)
    assert engine.closed
