"""Tests of the order of admission, and that every request is admitted eventually."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.orchestrator.admission.queue import EntryState
from stagemesh.pipeline import Bounds
from tests.orchestrator.admission.driver import AdmissionDriver, RecordedRequest


def _fill(driver: AdmissionDriver, *asks: dict[str, object]) -> list[str]:
    """Returns the order in which requests that arrive at a full pipeline are served."""
    first = driver.ask("first")
    return driver.serve([driver.ask(**ask) for ask in asks], first=first)  # type: ignore[arg-type]


ASKS: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "equal requests in order of arrival": ({"a": {}, "b": {}, "c": {}}, "a b c"),
    "higher priorities first": ({"low": {"priority": -1}, "usual": {}, "high": {"priority": 3}}, "high usual low"),
    "the earliest deadline first within a priority": (
        {"late": {"within_s": 90.0}, "never": {}, "soon": {"within_s": 9.0}, "high": {"priority": 1, "within_s": 99.0}},
        "high soon late never",
    ),
    "too high priorities as the limit": ({"ten": {"priority": 10}, "million": {"priority": 1_000_000}}, "ten million"),
}


@pytest.mark.parametrize(("asks", "order"), ASKS.values(), ids=ASKS)
def test_waiting_requests_are_admitted_in_order(asks: dict[str, dict[str, object]], order: str) -> None:
    assert _fill(AdmissionDriver(), *({"name": name, **ask} for name, ask in asks.items())) == order.split()


def test_a_caller_with_many_waiting_alternates_with_a_later_caller() -> None:
    asks: list[dict[str, object]] = [{"name": f"a{n}", "caller": "a"} for n in range(20)]
    order = _fill(AdmissionDriver(), *asks, {"name": "b0", "caller": "b"}, {"name": "b1", "caller": "b"})
    assert {order.index("b0"), order.index("b1")} <= set(range(5))


def test_a_caller_with_nothing_running_precedes_a_busy_caller() -> None:
    driver = AdmissionDriver(8)
    running = [driver.ask(caller="a") for _ in range(8)]
    waiting = [driver.ask(caller="a") for _ in range(8)] + [driver.ask(f"b{n}", caller="b") for n in range(8)]
    for recorded in running[:4]:
        driver.end(recorded)
    assert [name for name in driver.order if name.startswith("b")] == ["b0", "b1", "b2", "b3"]
    assert sum(recorded.runs for recorded in waiting) == 4


def test_callers_share_a_full_pipeline_evenly() -> None:
    driver = AdmissionDriver(12)
    recorded = [driver.ask(caller="greedy") for _ in range(200)]
    recorded += [driver.ask(caller=caller) for caller in ("b", "c") for _ in range(40)]
    for _ in range(40):
        driver.end(next(each for each in recorded if each.runs))
        recorded = [each for each in recorded if each.entry.state is not EntryState.GONE]
    assert Counter(each.request.caller for each in recorded if each.runs) == {"greedy": 4, "b": 4, "c": 4}


def test_a_large_request_counts_by_its_bytes() -> None:
    driver = AdmissionDriver(10, max_in_flight_bytes=100)
    first = [driver.ask(caller="large", input_bytes=60), driver.ask(caller="small", input_bytes=10)]
    first += [driver.ask(caller="small", input_bytes=10) for _ in range(3)]
    waiting = [driver.ask(caller="large", input_bytes=10), driver.ask(caller="small", input_bytes=10)]
    driver.end(first[1])
    assert [recorded.runs for recorded in waiting] == [False, True]


def test_no_request_overtakes_one_that_waits_for_bytes() -> None:
    driver = AdmissionDriver(10, max_in_flight_bytes=100)
    first = [driver.ask(input_bytes=50), driver.ask(input_bytes=50)]
    large, small = driver.ask(input_bytes=90), driver.ask(input_bytes=10)
    driver.end(first[0])
    assert (large.waits, small.waits) == (True, True)
    driver.end(first[1])
    assert (large.runs, small.runs) == (True, True)


def test_a_request_of_higher_priority_that_fits_runs_at_once() -> None:
    driver = AdmissionDriver(10, max_in_flight_bytes=100)
    driver.ask(input_bytes=50)
    large, urgent = driver.ask(input_bytes=90), driver.ask(input_bytes=10, priority=1)
    assert (large.waits, urgent.runs) == (True, True)


def test_a_caller_at_its_own_limit_delays_no_other_caller() -> None:
    driver = AdmissionDriver(2, per_caller=Bounds(max_in_flight=1))
    first = driver.ask(caller="a", priority=9)
    second = driver.ask(caller="a", priority=9)
    other = driver.ask(caller="b")
    assert (second.waits, other.runs) == (True, True)
    driver.end(first)
    assert second.runs


_ARRIVALS = st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from([5.0, 50.0, 500.0]))


@settings(deadline=None)
@given(st.lists(st.one_of(_ARRIVALS, st.sampled_from(["end", "leave"])), max_size=150))
def test_at_most_eight_requests_overtake_for_each_earlier_one(steps: list[tuple[str, int, float] | str]) -> None:
    driver = AdmissionDriver()
    running = driver.ask()
    waiting: list[tuple[RecordedRequest, int, int]] = []
    for step in steps:
        if isinstance(step, tuple):
            caller, priority, within_s = step
            ahead, passed = len(waiting), len(driver.order)
            waiting.append((driver.ask(caller=caller, priority=priority, within_s=within_s), ahead, passed))
        elif step == "leave" and waiting:
            recorded, _, _ = waiting.pop(len(waiting) // 2)
            assert driver.admission.withdraw(recorded.entry)
        elif waiting:
            driver.end(running)
            running = next(recorded for recorded, _, _ in waiting if recorded.runs)
            waiting = [each for each in waiting if each[0].waits]
        for _, ahead, passed in waiting:
            assert len(driver.order) - passed < 8 * (ahead + 1)
