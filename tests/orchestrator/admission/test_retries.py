"""Compares expected waits and retry delays with the actual times, in virtual time."""

from collections.abc import Sequence
from functools import cache

import pytest

from tests.orchestrator.admission.clients import SimulatedClients, SimulatedRequest
from tests.orchestrator.admission.driver import AdmissionDriver

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
