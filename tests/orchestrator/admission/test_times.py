"""Deadlines, expected waits and retry delays, and their comparison with actual times."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import pytest

from stagemesh.common.errors import DeadlineError, OverloadedError
from stagemesh.orchestrator.admission.estimates import RetrySchedule
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from stagemesh.pipeline import Bounds
from tests.orchestrator.admission.driver import AdmissionDriver, Agenda, RecordedRequest
from tests.rpc.call_errors import raises


@dataclass
class SimulatedRequest:
    """One client's request. Times are on the driver's clock."""

    recorded: RecordedRequest
    took_s: float
    came_s: float
    delay_s: float | None = None
    """The retry delay of the first rejection, in seconds."""
    in_s: float | None = None
    """The time at which the request was queued or admitted."""
    began_s: float | None = None


@dataclass
class SimulatedClients:
    """Clients with short and long requests. The fraction `retrying` of the rejected ones retries."""

    driver: AdmissionDriver
    seed: int
    arrivals_a_second: float
    retrying: float = 1.0
    requests: list[SimulatedRequest] = field(default_factory=list[SimulatedRequest])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._agenda = Agenda(self.driver.clock)

    @property
    def refused(self) -> list[SimulatedRequest]:
        """The requests that were rejected first and accepted later."""
        return [each for each in self.requests if each.delay_s is not None and each.in_s is not None]

    @property
    def queued(self) -> list[SimulatedRequest]:
        """The requests that waited in the queue and then ran."""
        return [each for each in self.requests if each.recorded.waits_s and each.began_s is not None]

    def run(self, *, for_s: float) -> None:
        """Sends requests for `for_s` seconds, and then waits until all are served."""
        at_s = 0.0
        while (at_s := at_s + self._random.expovariate(self.arrivals_a_second)) < for_s:
            recorded = RecordedRequest(AdmissionRequest(f"v{len(self.requests)}"))
            simulated = SimulatedRequest(recorded, self._duration_s(), at_s)
            recorded.on_admitted = partial(self._begin, simulated)
            self.requests.append(simulated)
            self._agenda.add(at_s, partial(self._arrive, simulated))
        self._agenda.run(until_s=for_s * 100)

    def _duration_s(self) -> float:
        return self._random.expovariate(1 / (0.5 if self._random.random() < 0.8 else 8.0))

    def _arrive(self, simulated: SimulatedRequest) -> None:
        try:
            simulated.recorded.entry = self.driver.admission.enter(simulated.recorded.request, simulated.recorded)
        except OverloadedError as exc:
            again_s = exc.retry_after_s or 0.0
            if simulated.delay_s is None:
                simulated.delay_s = again_s
                if self._random.random() >= self.retrying:
                    return
            self._agenda.add(again_s, partial(self._arrive, simulated))
        else:
            simulated.in_s = self.driver.clock.now_s

    def _begin(self, simulated: SimulatedRequest) -> None:
        simulated.began_s = self.driver.clock.now_s
        self._agenda.add(simulated.took_s, partial(self.driver.end, simulated.recorded))


def test_a_request_with_less_time_than_the_fastest_is_rejected_on_arrival(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=8.0)
    with raises(DeadlineError, reason="DEADLINE_UNREACHABLE", match=r"fastest recent request of its kind took 8\.0 s"):
        driver.ask(within_s=3.0)
    assert driver.ask(within_s=5.0).runs


def test_durations_of_another_kind_are_ignored() -> None:
    driver = AdmissionDriver(2)
    driver.run_before(took_s=8.0, kind="long")
    assert driver.ask(within_s=0.1, kind="short").runs


def test_few_samples_reject_no_request(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=8.0, times=7)
    assert driver.ask(within_s=0.1).runs


def test_the_fastest_of_different_durations_counts(driver: AdmissionDriver) -> None:
    for _ in range(8):
        driver.run_before(took_s=60.0, times=3)
        driver.run_before(took_s=0.2, times=1)
    assert driver.ask(within_s=1.0).runs


def test_old_samples_reject_no_request(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=8.0)
    driver.clock.now_s += 61.0
    assert driver.ask(within_s=0.1).runs


def test_a_request_with_less_time_than_its_wait_is_rejected_on_arrival(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=1.0)
    for _ in range(50):
        driver.ask()
    with pytest.raises(DeadlineError, match=r"it would wait about 50\.0 s"):
        driver.ask(within_s=20.0, priority=-1)
    assert driver.ask(within_s=30.0, priority=-1).waits


def test_a_guessed_wait_rejects_no_request(driver: AdmissionDriver) -> None:
    for _ in range(50):
        driver.ask()
    assert driver.ask(within_s=1.0, priority=-1).waits


def test_the_expected_wait_depends_on_the_position_in_the_queue(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=1.0)
    for _ in range(50):
        driver.ask()
    urgent = driver.ask(within_s=3.0)
    assert (urgent.waits, urgent.positions) == (True, [1])


def test_a_waiting_request_that_becomes_late_is_rejected(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=4.0)
    driver.ask()
    waiting = driver.ask(within_s=10.0)
    driver.clock.now_s += 7.9
    driver.admission.tick()
    assert waiting.waits
    driver.clock.now_s += 0.2
    driver.admission.tick()
    assert isinstance(waiting.error, DeadlineError)
    assert (waiting.error.reason, driver.admission.loads.waiting.requests) == ("DEADLINE_UNREACHABLE", 0)


def test_a_late_request_is_rejected_in_its_turn(driver: AdmissionDriver) -> None:
    driver.run_before(took_s=4.0)
    running, hopeless, other = driver.ask(), driver.ask(within_s=10.0), driver.ask()
    driver.end(running, after_s=9.0)
    assert (isinstance(hopeless.error, DeadlineError), other.runs) == (True, True)


def test_a_waiting_request_receives_its_position_and_expected_wait() -> None:
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


def test_an_unchanged_position_is_reported_once(driver: AdmissionDriver) -> None:
    driver.ask()
    waiting = driver.ask()
    for _ in range(5):
        driver.clock.now_s += 1.0
        driver.admission.tick()
    assert waiting.positions == [1]


def test_the_expected_wait_includes_that_for_the_limit_per_caller() -> None:
    driver = AdmissionDriver(10, per_caller=Bounds(max_in_flight=1))
    driver.run_before(took_s=3.0)
    driver.ask(caller="a")
    waiting = [driver.ask(caller="a"), driver.ask(caller="a")]
    assert [recorded.waits_s[0] for recorded in waiting] == pytest.approx([3.0, 6.0])


def test_rejected_requests_receive_successive_retry_delays() -> None:
    driver = AdmissionDriver(2, max_queued=0)
    _ = [driver.ask(), driver.ask()]
    assert [_rejection(driver) for _ in range(3)] == pytest.approx([0.55, 1.1, 1.65])


def test_many_requests_that_never_return_do_not_delay_retries_without_bound() -> None:
    schedule = RetrySchedule()
    delay_s = [schedule.assign(str(number), 0.0, interval_s=1.0) for number in range(12_000)]
    assert delay_s[-1] == delay_s[9_999]
    assert schedule.assign("later", delay_s[-1] + 2.0, interval_s=1.0) < 2.0


def test_a_request_that_retries_too_early_receives_the_remaining_delay() -> None:
    driver = AdmissionDriver(1, max_queued=0)
    driver.ask()
    delay_s = _rejection(driver, "early")
    driver.clock.now_s += 0.75
    assert _rejection(driver, "early") == pytest.approx(delay_s - 0.75)


def test_a_request_that_retries_in_time_precedes_new_requests() -> None:
    driver = AdmissionDriver(1, max_queued=1)
    running, _ = driver.ask(), driver.ask()
    again_s = _rejection(driver, "back")
    driver.end(running, after_s=again_s)
    with pytest.raises(OverloadedError):
        driver.ask("newcomer")
    assert driver.ask("back").waits


def test_another_caller_does_not_take_the_retry_slot_of_a_request() -> None:
    driver = AdmissionDriver(1, max_queued=1)
    running, _ = driver.ask(), driver.ask()
    again_s = _rejection(driver, "back", caller="alice")
    driver.end(running, after_s=again_s)
    _rejection(driver, "back", caller="mallory")
    assert driver.ask("back", caller="alice").waits


def test_a_retry_slot_expires() -> None:
    driver = AdmissionDriver(1, max_queued=1)
    running, _ = driver.ask(), driver.ask()
    again_s = _rejection(driver, "gone")
    driver.end(running, after_s=again_s + 1.1)
    assert driver.ask("newcomer").waits


def _rejection(driver: AdmissionDriver, name: str = "", *, caller: str = "") -> float:
    with pytest.raises(OverloadedError) as caught:
        driver.ask(name, caller=caller)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


MEAN_S = 2.0
"""The mean duration: 0.5 s for four of five requests and 8 s for the others, exponentially distributed."""


@cache
def _clients(*, load: float, retrying: float) -> SimulatedClients:
    """Returns five minutes of clients that request `load` times the capacity of the pipeline."""
    driver = AdmissionDriver(16, max_queued=64)
    clients = SimulatedClients(driver, seed=1, arrivals_a_second=load * 16 / MEAN_S, retrying=retrying)
    clients.run(for_s=300)
    return clients


def _relative_waits(requests: Sequence[SimulatedRequest]) -> float:
    """Returns the time until rejected requests were accepted, divided by their retry delays."""
    took_s = sum(simulated.in_s - simulated.came_s for simulated in requests if simulated.in_s is not None)
    return took_s / sum(simulated.delay_s for simulated in requests if simulated.delay_s is not None)


@pytest.mark.parametrize(("load", "retrying"), [(0.95, 1.0), (1.2, 1.0), (1.2, 0.5)])
def test_a_request_that_retries_at_its_time_is_accepted(load: float, retrying: float) -> None:
    refused = _clients(load=load, retrying=retrying).refused
    assert len(refused) > 50
    assert 1.0 <= _relative_waits(refused) < 1.2


@pytest.mark.parametrize("load", [0.95, 1.2])
def test_expected_waits_match_actual_waits(load: float) -> None:
    queued = _clients(load=load, retrying=1.0).queued
    assert len(queued) > 1000
    delay_s = sum(simulated.recorded.waits_s[0] for simulated in queued)
    waited_s = sum(simulated.began_s - simulated.in_s for simulated in queued if simulated.began_s and simulated.in_s)
    assert 0.85 < waited_s / delay_s < 1.15


def test_every_request_that_retries_is_served() -> None:
    clients = _clients(load=1.2, retrying=1.0)
    assert all(simulated.began_s is not None for simulated in clients.requests)
    assert clients.driver.admission.callers == ()
