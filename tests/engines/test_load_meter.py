"""The load of the vllm engine: running and queued requests, and the estimated remaining work."""

from dataclasses import dataclass

import pytest

from stagemesh.services.engines.base import EngineLoad
from stagemesh.services.engines.vllm.load_meter import LoadMeter


@dataclass
class Clock:
    """A clock that tests advance."""

    now_s: float = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> LoadMeter:
    return LoadMeter(clock=clock)


def test_an_idle_engine_has_no_load(meter: LoadMeter) -> None:
    assert meter.load(max_running=4) == EngineLoad(0, 0, work_s=0.0)


def test_requests_beyond_the_limit_are_queued(meter: LoadMeter) -> None:
    for number in range(5):
        meter.begin(str(number), [], 10)
    assert meter.load(max_running=3) == EngineLoad(3, 2, work_s=0.0)


def test_work_is_the_time_per_token_times_the_tokens_left(meter: LoadMeter, clock: Clock) -> None:
    one, other = [7, 7, 7], list[int]()
    meter.begin("one", one, 100)
    meter.begin("other", other, 60)
    # In 0.5 s, each of two requests samples 10 tokens. The tokens of a checkpoint, with which one began, do not count.
    one += [1] * 10
    other += [1] * 10
    clock.now_s += 0.5
    assert meter.load(max_running=8).work_s == pytest.approx(0.05 * (90 + 50) / 2)
    assert meter.load(max_running=1).work_s == pytest.approx(0.05 * (90 + 50))
    meter.end("one")
    assert meter.load(max_running=8).work_s == pytest.approx(0.05 * 50)


def test_newer_measurements_count_more(meter: LoadMeter, clock: Clock) -> None:
    sampled = list[int]()
    meter.begin("one", sampled, 1000)
    for token_s, expected_s in ((0.01, 0.01), (0.03, 0.02), (0.04, 0.03)):
        sampled += [1] * 10
        clock.now_s += 10 * token_s
        left = 1000 - len(sampled)
        assert meter.load(max_running=8).work_s == pytest.approx(expected_s * left)


def test_a_short_time_is_measured_with_the_next_one(meter: LoadMeter, clock: Clock) -> None:
    sampled = list[int]()
    meter.begin("one", sampled, 100)
    for _ in range(4):
        sampled += [1] * 2
        clock.now_s += 0.04
        meter.load(max_running=8)
    # After 0.12 s six tokens are measured; the last two belong to the next measurement.
    assert meter.load(max_running=8).work_s == pytest.approx(0.02 * 92)


def test_time_without_requests_does_not_count(meter: LoadMeter, clock: Clock) -> None:
    first, second = list[int](), list[int]()
    meter.begin("first", first, 10)
    first += [1] * 10
    meter.end("first")
    clock.now_s += 500
    meter.begin("second", second, 100)
    second += [1] * 10
    clock.now_s += 0.2
    assert meter.load(max_running=8).work_s == pytest.approx(0.02 * 90)


def test_a_stall_counts_as_one_second(meter: LoadMeter, clock: Clock) -> None:
    sampled = list[int]()
    meter.begin("one", sampled, 100)
    sampled += [1] * 10
    clock.now_s += 300
    assert meter.load(max_running=8).work_s == pytest.approx(0.1 * 90)


def test_a_request_that_samples_more_than_expected_has_no_tokens_left(meter: LoadMeter, clock: Clock) -> None:
    sampled = list[int]()
    meter.begin("one", sampled, 5)
    sampled += [1] * 8
    clock.now_s += 0.4
    assert meter.load(max_running=8).work_s == 0
