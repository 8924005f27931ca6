"""The scheduler orders steps by priority, deadline and length, and bounds every wait."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import UnavailableError
from stagemesh.services.engines.diffusion.executor import Executor, NextCall
from stagemesh.services.engines.diffusion.step_scheduler import BatchSizes, RequestProgress, StepLoop, StepScheduler


def turn(
    name: str, steps_left: int = 4, *, key: Hashable = None, priority: int = 0, tokens: int = 16
) -> RequestProgress:
    """Returns a turn that shares its step with no other turn, unless a key is given."""
    return RequestProgress(name, name if key is None else key, tokens, steps_left, priority=priority)


def scheduler(*turns: RequestProgress, max_wait_steps: int = 100, max_batch: int = 8) -> StepScheduler:
    made = StepScheduler(max_wait_steps=max_wait_steps, max_batch=max_batch)
    for each in turns:
        made.add(each, stop_at=each.total_steps)
    return made


def step(of: StepScheduler, *, seconds: float = 1.0, now_s: float = 0.0) -> list[str]:
    """Runs the next step and returns its requests. Finished requests leave the scheduler."""
    batch = of.next_batch(now_s)
    if batch:
        of.record(batch, [None] * len(batch), seconds=seconds)
    return [each.request_id for each in batch]


def test_without_requests_there_is_no_step() -> None:
    assert scheduler().next_batch(0.0) == []


def test_the_shortest_goes_first() -> None:
    of = scheduler(turn("long", 50), turn("short", 2))
    assert [step(of) for _ in range(3)] == [["short"], ["short"], ["long"]]


def test_equal_requests_go_in_arrival_order() -> None:
    assert step(scheduler(turn("first"), turn("second"))) == ["first"]


def test_priority_goes_before_length() -> None:
    assert step(scheduler(turn("short", 1), turn("urgent", 50, priority=1))) == ["urgent"]


def test_a_near_deadline_goes_before_priority() -> None:
    due, urgent = turn("due", 5), turn("urgent", 5, priority=9)
    due.deadline_s = 100.0
    of = scheduler(due, urgent)
    assert step(of, now_s=0.0) == ["urgent"]
    assert step(of, now_s=90.0) == ["urgent"]
    assert step(of, now_s=95.0) == ["due"]


def test_a_removed_request_gets_no_step() -> None:
    gone, stays = turn("gone", 1), turn("stays")
    of = scheduler(gone, stays)
    of.remove(gone)
    of.remove(gone)
    assert step(of) == ["stays"]


def test_a_request_that_stops_early_leaves_after_one_more_step() -> None:
    early, other = turn("early", 9, priority=1), turn("other", 9)
    of = scheduler(early, other)
    assert step(of) == ["early"]
    of.stop_early(early)
    assert [step(of), step(of)] == [["early"], ["other"]]
    assert (early.done, early.stop_at) == (2, 2)


def test_a_request_whose_step_fails_leaves() -> None:
    failing, other = turn("failing", 9, key="k"), turn("other", 9, key="k", priority=-1)
    of, error = scheduler(failing, other), UnavailableError("out of memory", reason="ENGINE_FAILED")
    assert of.record([failing, other], [error, None], seconds=1.0)
    assert of.requests == [other]
    assert (failing.error, failing.done, other.error, other.done) == (error, 0, None, 1)
    assert not of.record([other], [None], seconds=1.0)


def test_a_long_request_gets_steps_among_short_ones() -> None:
    of = scheduler(turn("long", 50), max_wait_steps=4)
    steps = list[str]()
    for number in range(10):
        of.add(turn(f"short {number}", 3), stop_at=3)
        steps += [name for _ in range(3) for name in step(of)]
    assert steps.count("long") == 6


ARRIVAL = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(-2, 2), st.integers(0, 3), st.integers(1, 200))
"""The time at which a request arrives, its steps, its priority, its key and its tokens."""


@given(st.lists(ARRIVAL, min_size=1, max_size=12), st.integers(0, 10), st.integers(1, 4))
def test_every_wait_is_bounded_and_every_request_ends(
    arrivals: list[tuple[int, int, int, int, int]], max_wait_steps: int, max_batch: int
) -> None:
    of = scheduler(max_wait_steps=max_wait_steps, max_batch=max_batch)
    coming = sorted(enumerate(arrivals), key=lambda each: each[1][0])
    waits: dict[str, int] = {}
    at, ended, steps = 0, 0, sum(steps for _, steps, *_ in arrivals)
    while ended < len(arrivals):
        while coming and coming[0][1][0] <= at:
            number, (_, steps_left, priority, key, tokens) = coming.pop(0)
            of.add(turn(str(number), steps_left, key=key, priority=priority, tokens=tokens), stop_at=steps_left)
            waits[str(number)] = 0
        done = step(of, now_s=at)
        assert not waits or done
        waits = {name: 0 if name in done else waited + 1 for name, waited in waits.items()}
        assert max(waits.values(), default=0) <= max_wait_steps + len(arrivals)
        for name in done:
            arrivals[int(name)] = (0, arrivals[int(name)][1] - 1, 0, 0, 0)
            if not arrivals[int(name)][1]:
                del waits[name]
                ended += 1
        at += 1
        assert at <= 41 + steps


def test_requests_with_the_same_key_share_a_step() -> None:
    of = scheduler(turn("a", 4, key="k"), turn("b", 5, key="k"), turn("other", 6, key="l"))
    for _ in range(2):
        assert step(of) == ["a"]
    assert step(of) == ["a", "b"]


def test_a_much_larger_request_does_not_join_a_step() -> None:
    of = scheduler(turn("small", 90, key="k", tokens=16), turn("large", 99, key="k", tokens=1024), max_batch=2)
    assert [step(of) for _ in range(20)] == [["small"]] * 20


def cost(fixed: float, each: float) -> list[int]:
    """Returns the chosen sizes in order, if a step of n rows takes `fixed + n * each` seconds."""
    sizes, chosen = BatchSizes(8), list[int]()
    for _ in range(60):
        chosen.append(sizes.size("k", 8))
        sizes.record("k", chosen[-1], fixed + chosen[-1] * each)
    return chosen


def test_rows_share_a_forward_pass_if_that_makes_each_cheaper() -> None:
    assert cost(1.0, 0.1)[-1] == 8


def test_rows_are_not_shared_if_that_saves_nothing() -> None:
    chosen = cost(0.001, 1.0)
    assert chosen[-1] == 1
    assert set(chosen) == set(range(1, 9))


def test_one_slow_step_does_not_decide() -> None:
    sizes = BatchSizes(2)
    sizes.record("k", 1, 1.0)
    sizes.record("k", 2, 50.0)
    for _ in range(6):
        size = sizes.size("k", 2)
        sizes.record("k", size, 1.0 if size == 1 else 1.1)
    assert sizes.size("k", 2) == 2


@pytest.mark.parametrize(("available", "at_most"), [(1, 1), (3, 3), (9, 4)])
def test_rows_are_limited_by_availability_and_option(available: int, at_most: int) -> None:
    sizes = BatchSizes(4)
    for _ in range(40):
        size = sizes.size("k", available)
        assert 1 <= size <= at_most
        sizes.record("k", size, 1.0)
    assert sizes.size("k", available) == at_most


def test_the_number_of_measured_size_classes_is_limited() -> None:
    sizes = BatchSizes(2)
    for number in range(5000):
        sizes.record(number, 1, 1.0)
    assert len(sizes._times) <= 1024


def test_remaining_work_is_estimated_in_seconds() -> None:
    of = scheduler(turn("a", 4), turn("b", 6))
    assert of.work_s() == 0
    step(of, seconds=0.5)
    assert of.work_s() == pytest.approx(0.5 * 9)


# -- the loop that runs the steps


_LIMIT_S = 10


class HeldExecutor:
    """An executor whose steps end when the test permits them."""

    def __init__(self) -> None:
        self.begun, self.permitted = Semaphore(0), Semaphore(0)
        self._thread = ThreadPoolExecutor(1)

    async def repeat(self, _method: str, next_call: NextCall, record: Callable[[Any], None]) -> None:
        def work() -> None:
            while (arguments := next_call()) is not None:
                self.begun.release()
                assert self.permitted.acquire(timeout=_LIMIT_S), "the test has not permitted the step"
                record([None] * len(arguments[0]))

        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def finish(self) -> None:
        """Permits the running step, and waits for its end."""
        self.permitted.release()
        await asyncio.to_thread(self._thread.shutdown)


async def test_a_request_fails_if_the_loop_ends_before_the_running_step() -> None:
    executor = HeldExecutor()
    loop = StepLoop(cast("Executor", executor), StepScheduler(max_wait_steps=8, max_batch=1))
    serving = asyncio.create_task(loop.serve())
    steps = loop.run_steps(RequestProgress("long", key="key", tokens=1, total_steps=9), stop_at=9)
    executor.permitted.release()
    assert await anext(steps) == 1
    for _ in range(2):
        assert await asyncio.to_thread(executor.begun.acquire, timeout=_LIMIT_S)
    serving.cancel()
    await asyncio.wait([serving])
    await executor.finish()
    with pytest.raises(UnavailableError, match="the engine has ended"):
        async with asyncio.timeout(_LIMIT_S):
            async for _ in steps:
                pass
