"""A replica whose engine hangs gives itself up; one that waits for others, or is slow, does not."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

import pytest
from pydantic import JsonValue

from benchmarks.simulation import virtual_time
from stagemesh.connectors.errors import UnavailableError
from stagemesh.services.engines.fake.engine import FakeEngine
from stagemesh.services.stage.stalling import StallWatch
from tests.stage.replicas import events_of, order, ready_runtime, stage_config

_HOUR_S = 3600.0


@dataclass(eq=False)
class _Run:
    computes: bool = True
    heard: int = 0


def _watch(runs: list[_Run], *, queued: int = 0, on_hung: Callable[[_Run], None] = lambda _: None) -> StallWatch[_Run]:
    return StallWatch(lambda: runs, stall_s=10.0, queued=lambda: queued, on_hung=on_hung)


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


def _hung(runs: list[_Run], *, queued: int = 0, ends: bool = True) -> tuple[list[_Run], float | None]:
    """Which runs hang alone within five minutes while the first gets on each second for one, and when all are stuck."""
    hung: list[_Run] = []

    def on_hung(run: _Run) -> None:
        hung.append(run)
        if ends:
            runs.remove(run)

    async def main() -> float | None:
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(_watch(runs, queued=queued, on_hung=on_hung).wait_stalled())
        for _ in range(60):
            await asyncio.wait([watching], timeout=1.0)
            runs[0].heard += 1
        await asyncio.wait([watching], timeout=240.0)
        stalled_s = loop.time() if watching.done() else None
        watching.cancel()
        return stalled_s

    stalled_s = virtual_time.run(main())
    return hung, stalled_s


def test_one_that_hangs_where_others_get_on_is_given_up_once() -> None:
    for ends in (True, False):
        runs = [_Run(), stuck := _Run(heard=3), _Run(computes=False, heard=1)]
        hung, _ = _hung(runs, ends=ends)
        assert hung == [stuck]


def test_one_that_may_wait_in_the_engines_queue_does_not_hang() -> None:
    runs = [_Run(), _Run()]
    assert _hung([*runs], queued=1)[0] == []
    assert _hung([*runs], queued=0)[0] == [runs[1]]


def test_one_that_is_given_up_is_no_sign_of_life() -> None:
    """An engine that got on for a minute, and then with nobody, is found out though its runs are given up in turn."""
    runs = [_Run(), *(_Run(heard=1) for _ in range(3))]
    hung, stalled_s = _hung(runs)
    assert len(hung) == 3
    assert stalled_s is not None
    assert 70.0 <= stalled_s <= 72.0


async def test_a_step_that_hangs_alone_fails_so_that_it_is_tried_elsewhere() -> None:
    hangs: JsonValue = [{"kind": "hang", "after_steps": 2, "attempts": 1}]
    config = replace(stage_config(), stall_s=1.0, options={"steps": 10_000, "step_s": 0.01, "faults": hangs})
    other = order("other", attempt=2)
    async with ready_runtime(config) as runtime, asyncio.timeout(20):
        watching = asyncio.create_task(runtime.watch_engine())
        gets_on = asyncio.create_task(events_of(runtime, replace(other, task=replace(other.task, attempt=2))))
        with pytest.raises(UnavailableError, match="got on with others") as caught:
            await events_of(runtime, order())
        assert caught.value.reason == "STEP_HANGS"
        assert not watching.done()
        for task in (watching, gets_on):
            task.cancel()
        await asyncio.gather(watching, gets_on, return_exceptions=True)


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
    monkeypatch.setattr("stagemesh.services.stage.runtime._LET_GO_S", 0.05)
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
