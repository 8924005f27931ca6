"""The estimate of a replica's work: the last report, minus the time since, plus what was placed since."""

import pytest

from stagemesh.orchestrator.fleet.replica import LoadEstimate, StepCost
from tests.orchestrator.replicas import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> LoadEstimate:
    return LoadEstimate(StepCost(), clock=clock)


def test_work_decreases_with_time(load: LoadEstimate, clock: Clock) -> None:
    load.report(3.0, steps=2)
    clock.now_s += 1.0
    assert load.work_s == pytest.approx(2.0)
    clock.now_s += 9.0
    assert load.work_s == 0


def test_requests_placed_since_the_report_count_as_one_step_each(load: LoadEstimate) -> None:
    load.report(3.0, steps=2)
    load.place()
    assert load.work_s == pytest.approx(4.5)


def test_released_requests_no_longer_count(load: LoadEstimate) -> None:
    load.report(3.0, steps=2)
    release = load.place()
    release()
    release()
    assert load.work_s == pytest.approx(3.0)
    assert load.running == 0


def test_a_request_in_the_report_counts_once(load: LoadEstimate) -> None:
    for _ in range(3):
        load.place()
    load.report(3.0, steps=3)
    assert load.work_s == pytest.approx(3.0)


def test_requests_that_the_report_cannot_contain_still_count(load: LoadEstimate) -> None:
    for _ in range(3):
        load.place()
    load.report(1.0, steps=1)
    assert load.work_s == pytest.approx(3.0)


def test_steps_are_counted_if_the_engine_does_not_estimate(load: LoadEstimate) -> None:
    load.report(0.0, steps=4)
    assert load.work_s == pytest.approx(4.0)
    load.report(0.0, steps=0)
    assert load.work_s == 0


def test_each_running_request_increases_the_backlog(load: LoadEstimate) -> None:
    load.report(3.0, steps=2)
    release = load.place()
    load.report(3.0, steps=2)
    assert load.work_s == pytest.approx(3.0)
    assert load.backlog_s == pytest.approx(4.5)
    release()
    assert load.backlog_s == pytest.approx(3.0)


@pytest.mark.parametrize("work_s", [float("nan"), float("inf")])
def test_an_estimate_that_is_not_finite_is_ignored(load: LoadEstimate, work_s: float) -> None:
    load.report(3.0, steps=2)
    load.report(work_s, steps=2)
    load.place()
    assert load.work_s == pytest.approx(1.5)


def test_an_engine_that_estimates_may_report_no_work(load: LoadEstimate) -> None:
    load.report(2.0, steps=1)
    load.report(0.0, steps=4)
    assert load.work_s == 0


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
