"""Tests of the limits on requests and bytes, and of rejections beyond them."""

import gc
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.common.errors import DeadlineError, OverloadedError, UnavailableError
from stagemesh.orchestrator.admission.queue import Load
from stagemesh.pipeline import Bounds
from tests.orchestrator.admission.driver import AdmissionDriver, RecordedRequest
from tests.rpc.call_errors import raises


def test_a_request_beyond_pipeline_and_queue_is_rejected() -> None:
    driver = AdmissionDriver(1, max_queued=1)
    driver.ask()
    driver.ask()
    with raises(OverloadedError, reason="ADMISSION_LIMIT", match="1 requests run and 1 wait"):
        driver.ask()


def test_a_request_with_many_choices_delays_others_only_until_it_ends() -> None:
    driver = AdmissionDriver(16)
    driver.run_before(took_s=10.0)
    driver.ask(choices=16)
    waits_s = [driver.ask(within_s=30.0).waits_s[-1] for _ in range(8)]
    assert waits_s == [pytest.approx(10 * position / 16) for position in range(1, 9)]


def test_a_request_larger_than_the_limit_runs_alone() -> None:
    driver = AdmissionDriver(10, max_in_flight_bytes=100)
    large, small = driver.ask(input_bytes=500), driver.ask(input_bytes=1)
    assert (large.runs, small.waits) == (True, True)


def test_the_average_output_of_the_kind_is_reserved() -> None:
    driver = AdmissionDriver(10, max_in_flight_bytes=100)
    driver.run_before(took_s=1.0, kind="picture", made_bytes=60)
    driver.run_before(took_s=1.0, kind="text", made_bytes=1, times=100)
    recorded = [driver.ask(kind=kind) for kind in ("picture", "text", "picture")]
    assert [each.runs for each in recorded] == [True, True, False]
    assert driver.admission.loads.running.size_bytes == 61


def test_a_caller_has_limits_of_its_own() -> None:
    driver = AdmissionDriver(10, per_caller=Bounds(max_in_flight=1, max_queued=1))
    recorded = [driver.ask(caller="a"), driver.ask(caller="a"), driver.ask(caller="b")]
    assert [each.runs for each in recorded] == [True, False, True]
    with raises(OverloadedError, reason="CALLER_LIMIT", match="caller 'a'"):
        driver.ask(caller="a")


def test_one_caller_cannot_fill_the_queue() -> None:
    driver = AdmissionDriver(1, max_queued=10)
    greedy = [driver.ask(caller="greedy") for _ in range(11)]
    others = [driver.ask(caller="b") for _ in range(5)]
    assert all(recorded.waits for recorded in others)
    assert Counter(recorded.reports[-1] for recorded in greedy) == {"admitted": 1, "queued": 5, "refused": 5}
    with pytest.raises(OverloadedError):
        driver.ask(caller="b")
    with pytest.raises(OverloadedError):
        driver.ask(caller="greedy")


def test_a_displaced_request_receives_a_retry_delay() -> None:
    driver = AdmissionDriver(1, max_queued=2)
    driver.ask(caller="greedy")
    _, last = driver.ask(caller="greedy"), driver.ask(caller="greedy")
    driver.ask(caller="b")
    assert isinstance(last.error, OverloadedError)
    assert last.error.retry_after_s is not None


def test_no_request_is_displaced_by_one_that_is_rejected() -> None:
    driver = AdmissionDriver(1, max_queued_bytes=100)
    first = driver.ask(caller="greedy")
    waiting = [driver.ask(caller="greedy", input_bytes=20) for _ in range(5)]
    with pytest.raises(OverloadedError):
        driver.ask(caller="b", input_bytes=70)
    assert all(recorded.waits for recorded in waiting)
    assert driver.serve(waiting, first=first) == [recorded.name for recorded in waiting]


def test_a_higher_priority_displaces_from_a_full_queue() -> None:
    driver = AdmissionDriver(1, max_queued=2)
    driver.ask()
    first, second = driver.ask(), driver.ask()
    high = driver.ask(priority=1)
    assert (first.waits, second.error is not None, high.waits) == (True, True, True)
    with pytest.raises(OverloadedError):
        driver.ask(priority=-1)


def test_the_load_of_the_pipeline_and_of_each_caller_is_known(driver: AdmissionDriver) -> None:
    driver.ask(caller="a", input_bytes=5)
    driver.ask(caller="b", input_bytes=7)
    loads = driver.admission.loads
    assert (loads.running, loads.waiting) == (Load(1, 1, 5), Load(1, 1, 7))
    by_caller = [(caller.name, caller.running, caller.waiting) for caller in driver.admission.callers]
    assert by_caller == [("a", Load(1, 1, 5), Load()), ("b", Load(), Load(1, 1, 7))]


def test_callers_without_requests_are_dropped(driver: AdmissionDriver) -> None:
    running, waiting = driver.ask(caller="a"), driver.ask(caller="b")
    driver.admission.withdraw(waiting.entry)
    driver.end(running)
    assert driver.admission.callers == ()


@pytest.mark.parametrize("urgent_first", [True, False])
def test_entries_that_left_the_queue_are_freed(urgent_first: bool) -> None:
    driver = AdmissionDriver(1, max_queued=1000)
    driver.ask(caller="first")
    here = [driver.ask(caller="b", within_s=50.0)] if urgent_first else []
    waiting = [driver.ask(within_s=99.0) for _ in range(500)]
    driver.admission.tick()
    driver.admission.tick()
    gone = [weakref.ref(recorded.entry) for recorded in waiting]
    while waiting:
        driver.admission.withdraw(waiting.pop().entry)
    for _ in range(3 if here else 1):
        driver.admission.tick()
    gc.collect()
    assert sum(entry() is not None for entry in gone) <= 50
    assert all(recorded.waits for recorded in here)


def test_closing_rejects_waiting_requests_only(driver: AdmissionDriver) -> None:
    running, waiting = driver.ask(), [driver.ask(caller=caller) for caller in "ab"]
    driver.admission.close(UnavailableError("it stops"))
    assert (running.runs, [str(recorded.error) for recorded in waiting]) == (True, ["it stops"] * 2)
    assert driver.admission.loads.waiting.requests == 0


def test_a_request_counts_once_for_each_choice() -> None:
    driver = AdmissionDriver(4, max_queued=2)
    first, second, third = (driver.ask(choices=choices) for choices in (2, 3, 1))
    # A request that waits for more slots is not overtaken.
    assert (first.runs, second.waits, third.waits) == (True, True, True)
    assert (driver.admission.loads.running, driver.admission.loads.waiting) == (Load(1, 2), Load(2, 2))
    driver.end(first)
    assert (second.runs, third.runs) == (True, True)


def test_a_request_that_waits_for_slots_of_its_caller_is_not_overtaken() -> None:
    driver = AdmissionDriver(9, per_caller=Bounds(max_in_flight=3))
    first, second = driver.ask(caller="a", choices=2), driver.ask(caller="a", choices=3)
    third, other = driver.ask(caller="a"), driver.ask(caller="b", choices=3)
    assert (first.runs, second.waits, third.waits, other.runs) == (True, True, True, True)
    driver.end(first)
    assert (second.runs, third.waits) == (True, True)


def test_a_caller_with_several_choices_has_a_larger_share() -> None:
    driver = AdmissionDriver(4)
    driver.ask(caller="a", choices=3)
    last = driver.ask(caller="b")
    waiting = [driver.ask("a2", caller="a"), driver.ask("b2", caller="b")]
    driver.end(last)
    assert [recorded.runs for recorded in waiting] == [False, True]


_ASKS = st.fixed_dictionaries(
    {
        "caller": st.sampled_from("abc"),
        "priority": st.integers(-1, 1),
        "within_s": st.sampled_from([1.0, 9.0, 99.0]),
        "input_bytes": st.integers(0, 30),
        "choices": st.sampled_from([1, 1, 1, 2, 3]),
    }
)


@settings(deadline=None)
@given(st.lists(st.one_of(_ASKS, st.sampled_from(["end", "leave", "tick"])), max_size=120))
def test_limits_hold_for_any_sequence_of_arrivals_and_ends(steps: list[dict[str, Any] | str]) -> None:
    per_caller = Bounds(max_in_flight=3)
    driver = AdmissionDriver(4, max_queued=6, max_in_flight_bytes=100, max_queued_bytes=90, per_caller=per_caller)
    here: list[RecordedRequest] = []
    for number, step in enumerate(steps):
        driver.clock.now_s += 0.5
        if isinstance(step, dict):
            with suppress(OverloadedError, DeadlineError):
                here.append(driver.ask(**step))
        elif step == "tick":
            driver.admission.tick()
        else:
            chosen = [recorded for recorded in here if (recorded.runs if step == "end" else recorded.waits)]
            if chosen:
                _take_away(driver, chosen[number % len(chosen)], here)
        here = [recorded for recorded in here if recorded.reports[-1] != "refused"]
        _check(driver, here)


def _take_away(driver: AdmissionDriver, recorded: RecordedRequest, here: list[RecordedRequest]) -> None:
    here.remove(recorded)
    if recorded.runs:
        driver.end(recorded)
    else:
        driver.admission.withdraw(recorded.entry)


def _check(driver: AdmissionDriver, here: list[RecordedRequest]) -> None:
    running, waiting = [each for each in here if each.runs], [each for each in here if each.waits]
    loads = driver.admission.loads
    slots, by_caller = 0, Counter[str]()
    for recorded in running:
        slots += recorded.request.choices
        by_caller[recorded.request.caller] += recorded.request.choices
    sizes = [recorded.request.input_bytes * recorded.request.choices for recorded in running]
    assert (loads.running.requests, loads.waiting.requests) == (len(running), len(waiting))
    assert (loads.running.choices, loads.running.size_bytes) == (slots, sum(sizes))
    assert loads.waiting.size_bytes == sum(recorded.request.input_bytes for recorded in waiting) <= 90
    assert sum(sizes) <= 100
    assert slots <= 4
    assert len(waiting) <= 6
    assert all(count <= 3 for count in by_caller.values())
    if any(recorded.request.choices > 1 for recorded in waiting):
        # Requests may wait behind one that needs several slots.
        return
    could_run = [recorded for recorded in waiting if by_caller[recorded.request.caller] < 3]
    assert not could_run or slots == 4 or loads.running.size_bytes > 70
