"""Which replica gets a request: the estimates of their work, locality, and even draws."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.orchestrator.fleet.replica import LoadEstimate, Replica, StepCost
from stagemesh.orchestrator.fleet.replica_registry import RandomPool, ReadyReplicas, ReplicaRegistry
from stagemesh.orchestrator.planning.planner import LeastWork, Planner
from stagemesh.pipeline import Pipeline
from tests.orchestrator.replicas import Clock, ready_replica


def _ready(*replicas: Replica) -> ReadyReplicas:
    ready = ReadyReplicas()
    for replica in replicas:
        ready.add(replica)
    return ready


def _picks(ready: ReadyReplicas, *near: Replica, count: int = 200) -> set[str]:
    choice = LeastWork(random.Random(7))
    picked = {choice.choose(ready, near=near) for _ in range(count)}
    return {replica.name for replica in picked if replica is not None}


def test_the_replica_with_less_work_is_chosen(pipeline: Pipeline) -> None:
    idle, busy = ready_replica("b-0", pipeline), ready_replica("b-1", pipeline)
    busy.load.report(2.0, steps=1)
    assert _picks(_ready(idle, busy)) == {"b-0"}


def test_the_busiest_replica_is_never_chosen(pipeline: Pipeline) -> None:
    replicas = [ready_replica(f"b-{number}", pipeline) for number in range(10)]
    replicas[3].load.report(2.0, steps=1)
    assert _picks(_ready(*replicas)) == {f"b-{number}" for number in range(10)} - {"b-3"}


@pytest.mark.parametrize(("host", "far_zone"), [("here", "z"), ("there", "y")], ids=["same host", "same zone"])
def test_a_near_replica_is_found_among_many(pipeline: Pipeline, host: str, far_zone: str) -> None:
    producer = ready_replica("a-0", pipeline, host="here", zone="z")
    near = ready_replica("b-near", pipeline, host=host, zone="z")
    far = [ready_replica(f"b-{number}", pipeline, host=f"h{number}", zone=far_zone) for number in range(100)]
    assert _picks(_ready(near, *far), producer) == {"b-near"}


def test_locality_does_not_outweigh_work(pipeline: Pipeline) -> None:
    producer = ready_replica("a-0", pipeline, host="here")
    near, far = ready_replica("b-near", pipeline, host="here"), ready_replica("b-far", pipeline, host="there")
    near.load.report(0.5, steps=1)
    assert _picks(_ready(near, far), producer) == {"b-far"}


def test_replicas_to_avoid_are_never_chosen(pipeline: Pipeline) -> None:
    replicas = [ready_replica(f"b-{number}", pipeline) for number in range(4)]
    choice = LeastWork(random.Random(7))
    picked = {choice.choose(_ready(*replicas), avoid=replicas[1:]) for _ in range(50)}
    assert picked == {replicas[0]}
    assert choice.choose(_ready(*replicas), avoid=replicas) is None


def test_a_plan_keeps_adjacent_stages_on_one_host(pipeline: Pipeline) -> None:
    registry = ReplicaRegistry()
    for host in range(20):
        for stage in pipeline.stages:
            ready_replica(f"{stage}-{host}", pipeline, registry=registry, host=f"h{host}")
    planner = Planner(pipeline, registry)
    for _ in range(20):
        plan = planner.plan(pipeline.route(["last"]))
        assert len({step.replica.host for step in plan.steps.values()}) == 1
        plan.release()


def test_uneven_work_queues_less_than_with_round_robin(pipeline: Pipeline) -> None:
    """Simulates ten replicas. Every tenth request takes twenty times as long as the others."""
    rng = random.Random(3)
    sizes = [20.0 if rng.random() < 0.1 else 1.0 for _ in range(3000)]

    def longest_wait(*, by_turns: bool) -> float:
        left_s = [0.0] * 10
        replicas = [ready_replica(f"b-{number}", pipeline) for number in range(10)]
        ready, choice, waits = _ready(*replicas), LeastWork(random.Random(5)), []
        for number, size in enumerate(sizes):
            left_s[:] = [max(0.0, left - 0.32) for left in left_s]
            for replica, left in zip(replicas, left_s, strict=True):
                replica.load.report(left, steps=1)
            picked = replicas[number % 10] if by_turns else choice.choose(ready)
            assert picked is not None
            waits.append(left_s[replicas.index(picked)])
            left_s[replicas.index(picked)] += size
        return sorted(waits)[int(0.99 * len(waits))]

    assert longest_wait(by_turns=True) >= 2 * longest_wait(by_turns=False)


@pytest.fixture
def load(clock: Clock) -> LoadEstimate:
    return LoadEstimate(StepCost(), clock=clock)


def test_work_decreases_with_time(load: LoadEstimate, clock: Clock) -> None:
    load.report(3.0, steps=2)
    clock.now_s += 1.0
    assert load.work_s == pytest.approx(2.0)
    clock.now_s += 9.0
    assert load.work_s == 0


_WORK = {
    "a request placed since the report counts as one step": (0, [(3.0, 2)], 1, 4.5),
    "requests in the report count once": (3, [(3.0, 3)], 0, 3.0),
    "requests that the report cannot contain still count": (3, [(1.0, 1)], 0, 3.0),
    "steps are counted if the engine does not estimate": (0, [(0.0, 4)], 0, 4.0),
    "an engine that does not estimate may have no steps": (0, [(0.0, 4), (0.0, 0)], 0, 0.0),
    "an engine that estimates may report no work": (0, [(2.0, 1), (0.0, 4)], 0, 0.0),
    "an estimate that is not a number is ignored": (0, [(3.0, 2), (math.nan, 2)], 1, 1.5),
    "an infinite estimate is ignored": (0, [(3.0, 2), (math.inf, 2)], 1, 1.5),
}


@pytest.mark.parametrize(("placed", "reports", "placed_later", "work_s"), _WORK.values(), ids=_WORK)
def test_the_work_follows_from_reports_and_placed_requests(
    load: LoadEstimate, placed: int, reports: list[tuple[float, int]], placed_later: int, work_s: float
) -> None:
    for _ in range(placed):
        load.place()
    for reported_s, steps in reports:
        load.report(reported_s, steps=steps)
    for _ in range(placed_later):
        load.place()
    assert load.work_s == pytest.approx(work_s)


def test_released_requests_no_longer_count(load: LoadEstimate) -> None:
    load.report(3.0, steps=2)
    release = load.place()
    release()
    release()
    assert load.work_s == pytest.approx(3.0)
    assert load.running == 0


def test_each_running_request_increases_the_backlog(load: LoadEstimate) -> None:
    load.report(3.0, steps=2)
    release = load.place()
    load.report(3.0, steps=2)
    assert load.work_s == pytest.approx(3.0)
    assert load.backlog_s == pytest.approx(4.5)
    release()
    assert load.backlog_s == pytest.approx(3.0)


def test_a_request_in_the_report_is_not_subtracted_at_its_release(load: LoadEstimate) -> None:
    load.report(3.0, steps=2)
    release = load.place()
    load.report(1.0, steps=1)
    release()
    assert load.work_s == pytest.approx(1.0)


def test_a_replica_that_does_not_estimate_is_not_idle(clock: Clock) -> None:
    cost = StepCost()
    one, other = LoadEstimate(cost, clock=clock), LoadEstimate(cost, clock=clock)
    one.report(8.0, steps=2)
    other.report(None, steps=3)
    assert other.work_s == pytest.approx(12.0)


def test_replicas_of_a_stage_learn_from_each_other(clock: Clock) -> None:
    cost = StepCost()
    one, other = LoadEstimate(cost, clock=clock), LoadEstimate(cost, clock=clock)
    one.report(8.0, steps=2)
    other.place()
    assert other.work_s == pytest.approx(4.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_a_pool_contains_the_items_of_a_set(changes: list[tuple[bool, int]]) -> None:
    pool, expected = RandomPool[int](), set[int]()
    for adds, item in changes:
        (pool.add if adds else pool.discard)(item)
        (expected.add if adds else expected.discard)(item)
        assert (len(pool), set(pool)) == (len(expected), expected)
        assert all((item in pool) is (item in expected) for item in range(10))


@given(st.sets(st.integers(0, 99)), st.integers(0, 10))
def test_drawn_items_are_different_and_as_many_as_there_are(items: set[int], count: int) -> None:
    pool = RandomPool[int]()
    for item in items:
        pool.add(item)
    drawn = pool.draw(count, random.Random(1))
    assert len(drawn) == len(set(drawn)) == min(count, len(items))
    assert set(drawn) <= items


def test_all_items_are_drawn_equally_often() -> None:
    pool, rng = RandomPool[int](), random.Random(1)
    for item in range(20):
        pool.add(item)
    pool.discard(3)
    drawn = Counter(item for _ in range(4000) for item in pool.draw(2, rng))
    assert set(drawn) == set(range(20)) - {3}
    assert max(drawn.values()) < 1.5 * min(drawn.values())
