"""A replica whose engine hangs gives itself up; one that waits for others, or is slow, does not."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace

import pytest
from pydantic import JsonValue

from benchmarks.simulation import virtual_time
from stagemesh.common.errors import UnavailableError
from stagemesh.services.engines.fake.engine import FakeEngine
from stagemesh.services.stage.replica.hang_detection import StallWatch
from stagemesh.services.stage.replica.runtime import StageRuntime
from tests.stage.replicas import events_of, order, ready_runtime, stage_config

_HOUR_S = 3600.0


_numbers = itertools.count()


@dataclass(eq=False)
class _Run:
    computes: bool = True
    heard: int = 0
    priority: int = 0
    number: int = field(default_factory=lambda: next(_numbers))


def _watch(runs: list[_Run], *, on_hung: Callable[[_Run], None] = lambda _: None) -> StallWatch[_Run]:
    return StallWatch(lambda: runs, stall_s=10.0, on_hung=on_hung)


def _stalled(runs: list[_Run], life: Callable[[], Coroutine[object, object, None]]) -> float | None:
    """When a watch with a bound of 10 s says that the runs hang, in the course of a life of theirs; None for never."""

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
    await asyncio.sleep(_HOUR_S)


def test_a_run_of_which_nothing_is_heard_hangs() -> None:
    stalled_s = _stalled([_Run()], _an_hour)
    assert stalled_s is not None
    assert 10.0 <= stalled_s <= 11.0


def test_runs_that_wait_for_others_do_not_hang() -> None:
    assert _stalled([_Run(computes=False), _Run(computes=False)], _an_hour) is None


def test_one_that_gets_on_speaks_for_all() -> None:
    runs = [_Run(), _Run()]

    async def life() -> None:
        for _ in range(100):
            await asyncio.sleep(9.0)
            runs[0].heard += 1

    assert _stalled(runs, life) is None


def test_one_that_gets_on_between_two_waits_for_its_input_speaks_for_all() -> None:
    runs = [_Run(computes=False), _Run()]

    async def life() -> None:
        for _ in range(100):
            await asyncio.sleep(9.0)
            runs[0].heard += 1

    assert _stalled(runs, life) is None


def test_one_that_ends_speaks_for_all() -> None:
    runs = [_Run()]

    async def life() -> None:
        for _ in range(100):
            await asyncio.sleep(8.0)
            runs.append(_Run())
            await asyncio.sleep(0.6)
            runs.pop(0)

    assert _stalled(runs, life) is None


def test_a_new_run_says_nothing_of_one_that_hangs() -> None:
    runs = [_Run()]

    async def life() -> None:
        while True:
            await asyncio.sleep(3.0)
            runs.append(_Run())

    stalled_s = _stalled(runs, life)
    assert stalled_s is not None
    assert stalled_s <= 11.0


def _hung(runs: list[_Run], *, ends: bool = True, per_s: int = 10) -> tuple[list[_Run], str]:
    """Which runs are said to hang alone within a minute in which the last one gets on, and what is said of the engine
    by the end of the minute after it, in which none does.
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
            runs[-1].heard += per_s
        await asyncio.wait([watching], timeout=60.0)
        said = watching.result() if watching.done() else ""
        watching.cancel()
        return said

    return hung, virtual_time.run(main())


@pytest.mark.parametrize("heard", [0, 3])
def test_one_that_hangs_where_later_ones_get_on_is_given_up_once(heard: int) -> None:
    hung, said = _hung([stuck := _Run(heard=heard), _Run(computes=False, heard=1), _Run()])
    assert hung == [stuck]
    assert "1 steps have what they need, and none has got on" in said


def test_an_engine_that_does_not_let_go_of_one_hangs() -> None:
    hung, said = _hung([_Run(), _Run()], ends=False)
    assert len(hung) == 1
    assert "a step that it should have let go of has not ended" in said


def test_one_whose_turn_has_not_come_does_not_hang() -> None:
    gets_on = _Run()
    assert _hung([_Run(), gets_on], per_s=1)[0] == []
    assert _hung([_Run(priority=1), _Run(), gets_on], per_s=0)[0] == []
    assert _hung([_Run(priority=-1), _Run()])[0] == []
    # Those that came later wait for those before them.
    assert _hung([later := _Run(), gets_on])[0] == []
    assert later.number > gets_on.number


def test_one_that_is_given_up_is_no_sign_of_life() -> None:
    """An engine that gets on with nobody any more is found out though its runs are given up in turn."""
    runs = [_Run() for _ in range(4)]

    async def main() -> float:
        watching = asyncio.create_task(_watch(runs, on_hung=runs.remove).wait_stalled())
        for _ in range(8):
            await asyncio.sleep(1.0)
            runs[-1].heard += 100
            for run in runs[:-1]:
                run.heard += 1
        for run in runs[1:-1]:
            run.heard += 100
        assert "hangs" in await watching
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) <= 8.0 + 11.0


async def test_a_step_that_hangs_alone_fails_so_that_it_is_tried_elsewhere() -> None:
    hangs: JsonValue = [{"kind": "hang", "after_steps": 2, "attempts": 1}]
    config = replace(stage_config(), stall_s=1.0, options={"steps": 10_000, "step_s": 0.01, "faults": hangs})
    other = order("other", attempt=2)
    async with ready_runtime(config) as runtime, asyncio.timeout(20):
        watching = asyncio.create_task(runtime.watch_engine())
        hanging = asyncio.create_task(events_of(runtime, order()))
        await until_running(runtime, 1)
        gets_on = asyncio.create_task(events_of(runtime, replace(other, task=replace(other.task, attempt=2))))
        with pytest.raises(UnavailableError, match="got on with later ones") as caught:
            await hanging
        assert caught.value.reason == "STEP_HANGS"
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
        asking = asyncio.create_task(events_of(runtime, order()))
        with pytest.raises(UnavailableError, match="the engine hangs: 1 steps have what they need") as caught:
            await runtime.watch_engine()
        assert caught.value.reason == "ENGINE_DIED"
        with pytest.raises(UnavailableError, match="the engine hangs"):
            await asking


async def test_an_engine_that_does_not_let_go_has_died_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class StuckEngine(FakeEngine):
        """Holds on to what it has."""

        async def submit(self, task):  # type: ignore[no-untyped-def]  # noqa: ANN001,ANN202
            try:
                await asyncio.Event().wait()
                yield
            finally:
                await let_go.wait()

    let_go = asyncio.Event()
    monkeypatch.setattr("stagemesh.services.stage.replica.runtime._LET_GO_S", 0.05)
    config = replace(stage_config(), stall_s=0.4)
    async with ready_runtime(engine=StuckEngine(config), config=config) as runtime, asyncio.timeout(10):
        asking = asyncio.create_task(events_of(runtime, order()))
        with pytest.raises(UnavailableError, match="the engine hangs"):
            await runtime.watch_engine()
        let_go.set()
        with pytest.raises(UnavailableError):
            await asking


async def test_a_slow_step_within_the_bound_is_waited_for() -> None:
    config = replace(stage_config(steps=4, step_s=0.3), stall_s=1.0)
    async with ready_runtime(config) as runtime, asyncio.timeout(10):
        watching = asyncio.create_task(runtime.watch_engine())
        await events_of(runtime, order())
        assert not watching.done()
        watching.cancel()
