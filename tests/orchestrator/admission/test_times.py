"""Deadlines that cannot be kept, what those who wait are told, and when those who were refused are to come back."""

import pytest

from stagemesh.common.errors import DeadlineError, OverloadedError
from stagemesh.orchestrator.admission.retry_schedule import RetrySchedule
from stagemesh.orchestrator.spec import Bounds
from tests.orchestrator.admission.driver import AdmissionDriver


def test_who_has_less_time_than_any_took_is_refused_at_the_door() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=8.0)
    with pytest.raises(DeadlineError, match=r"fastest recent request of its kind took 8\.0 s") as caught:
        driver.ask(within_s=3.0)
    assert caught.value.reason == "DEADLINE_UNREACHABLE"
    assert driver.ask(within_s=5.0).runs


def test_another_kind_of_request_is_not_judged_by_it() -> None:
    driver = AdmissionDriver(2)
    driver.run_before(took_s=8.0, kind="long")
    assert driver.ask(within_s=0.1, kind="short").runs


def test_few_requests_say_nothing_of_others() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=8.0, times=7)
    assert driver.ask(within_s=0.1).runs


def test_the_fastest_of_a_mixture_counts() -> None:
    driver = AdmissionDriver()
    for _ in range(8):
        driver.run_before(took_s=60.0, times=3)
        driver.run_before(took_s=0.2, times=1)
    assert driver.ask(within_s=1.0).runs


def test_what_was_long_ago_no_longer_refuses() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=8.0)
    driver.clock.now_s += 61.0
    assert driver.ask(within_s=0.1).runs


def test_who_cannot_get_through_the_queue_in_time_is_refused_at_the_door() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=1.0)
    for _ in range(50):
        driver.ask()
    with pytest.raises(DeadlineError, match=r"it would wait about 50\.0 s"):
        driver.ask(within_s=20.0, priority=-1)
    assert driver.ask(within_s=30.0, priority=-1).waits


def test_a_guess_at_the_wait_refuses_nobody() -> None:
    driver = AdmissionDriver()
    for _ in range(50):
        driver.ask()
    assert driver.ask(within_s=1.0, priority=-1).waits


def test_an_urgent_one_is_judged_by_its_place_and_not_by_the_queue() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=1.0)
    for _ in range(50):
        driver.ask()
    urgent = driver.ask(within_s=3.0)
    assert (urgent.waits, urgent.positions) == (True, [1])


def test_who_becomes_hopeless_in_the_queue_is_refused_then() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=4.0)
    driver.ask()
    waiting = driver.ask(within_s=10.0)
    driver.clock.now_s += 7.9
    driver.admission.tick()
    assert waiting.waits
    driver.clock.now_s += 0.2
    driver.admission.tick()
    assert isinstance(waiting.error, DeadlineError)
    assert (waiting.error.reason, driver.admission.queued) == ("DEADLINE_UNREACHABLE", 0)


def test_a_hopeless_one_is_passed_by_when_its_turn_comes() -> None:
    driver = AdmissionDriver()
    driver.run_before(took_s=4.0)
    running, hopeless, other = driver.ask(), driver.ask(within_s=10.0), driver.ask()
    driver.end(running, after_s=9.0)
    assert (isinstance(hopeless.error, DeadlineError), other.runs) == (True, True)


def test_who_waits_hears_its_place_and_about_how_long() -> None:
    driver = AdmissionDriver(2)
    driver.run_before(took_s=4.0)
    running = [driver.ask(), driver.ask()]
    first, second = driver.ask(), driver.ask()
    assert (first.positions, second.positions) == ([1], [2])
    assert first.waits_s + second.waits_s == pytest.approx([2.0, 4.0])
    driver.end(running[0], after_s=2.0)
    driver.admission.tick()
    driver.admission.tick()
    assert (first.runs, second.positions) == (True, [2, 1])


def test_a_place_that_stays_is_told_once() -> None:
    driver = AdmissionDriver()
    driver.ask()
    waiting = driver.ask()
    for _ in range(5):
        driver.clock.now_s += 1.0
        driver.admission.tick()
    assert waiting.positions == [1]


def test_who_waits_for_its_own_callers_limit_hears_that_wait() -> None:
    driver = AdmissionDriver(10, per_caller=Bounds(max_in_flight=1))
    driver.run_before(took_s=3.0)
    driver.ask(caller="a")
    waiting = [driver.ask(caller="a"), driver.ask(caller="a")]
    assert [recorded.waits_s[0] for recorded in waiting] == pytest.approx([3.0, 6.0])


def test_those_who_are_refused_are_told_one_time_after_the_other() -> None:
    driver = AdmissionDriver(2, max_queued=0)
    _ = [driver.ask(), driver.ask()]
    assert [_refused(driver) for _ in range(3)] == pytest.approx([0.55, 1.1, 1.65])


def test_a_flood_of_those_who_never_come_back_does_not_push_the_times_off_for_ever() -> None:
    schedule = RetrySchedule()
    delay_s = [schedule.assign(str(number), 0.0, interval_s=1.0) for number in range(12_000)]
    assert delay_s[-1] == delay_s[9_999]
    assert schedule.assign("later", delay_s[-1] + 2.0, interval_s=1.0) < 2.0


def test_who_asks_too_early_is_told_what_is_left() -> None:
    driver = AdmissionDriver(1, max_queued=0)
    driver.ask()
    delay_s = _refused(driver, "early")
    driver.clock.now_s += 0.75
    assert _refused(driver, "early") == pytest.approx(delay_s - 0.75)


def test_who_comes_back_in_time_goes_before_newcomers() -> None:
    driver = AdmissionDriver(1, max_queued=1)
    running, _ = driver.ask(), driver.ask()
    again_s = _refused(driver, "back")
    driver.end(running, after_s=again_s)
    with pytest.raises(OverloadedError):
        driver.ask("newcomer")
    assert driver.ask("back").waits


def test_a_place_is_not_kept_for_ever() -> None:
    driver = AdmissionDriver(1, max_queued=1)
    running, _ = driver.ask(), driver.ask()
    again_s = _refused(driver, "gone")
    driver.end(running, after_s=again_s + 1.1)
    assert driver.ask("newcomer").waits


def _refused(driver: AdmissionDriver, name: str = "") -> float:
    with pytest.raises(OverloadedError) as caught:
        driver.ask(name)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s
