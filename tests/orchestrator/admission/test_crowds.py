"""What is told to those who wait and to those who are refused, against what then happens, in virtual time."""

from collections.abc import Sequence
from functools import cache

import pytest

from tests.orchestrator.admission.crowds import Crowd, Visit
from tests.orchestrator.admission.doors import Door

MEAN_S = 2.0
"""Of a crowd's requests: half a second for four of five, else eight; spread as the exponential distribution is."""


@cache
def _crowd(*, load: float, come_back: float) -> Crowd:
    """Five minutes of clients who ask for `load` times what the pipeline can do."""
    door = Door(16, max_queued=64)
    crowd = Crowd(door, seed=1, arrivals_a_second=load * 16 / MEAN_S, come_back=come_back)
    crowd.run(for_s=300)
    return crowd


def _came_true(visits: Sequence[Visit]) -> float:
    """How long those who were refused took to find a place, by how long they were told."""
    took_s = sum(visit.in_s - visit.came_s for visit in visits if visit.in_s is not None)
    return took_s / sum(visit.told_s for visit in visits if visit.told_s is not None)


@pytest.mark.parametrize(("load", "come_back"), [(0.95, 1.0), (1.2, 1.0), (1.2, 0.5)])
def test_who_comes_back_when_told_finds_a_place_then(load: float, come_back: float) -> None:
    refused = _crowd(load=load, come_back=come_back).refused
    assert len(refused) > 50
    assert 1.0 <= _came_true(refused) < 1.2


@pytest.mark.parametrize("load", [0.95, 1.2])
def test_those_who_wait_do_so_for_about_as_long_as_they_were_told(load: float) -> None:
    queued = _crowd(load=load, come_back=1.0).queued
    assert len(queued) > 1000
    told_s = sum(visit.asked.waits_s[0] for visit in queued)
    waited_s = sum(visit.began_s - visit.in_s for visit in queued if visit.began_s and visit.in_s)
    assert 0.85 < waited_s / told_s < 1.15


def test_everybody_who_comes_back_is_served_in_the_end() -> None:
    crowd = _crowd(load=1.2, come_back=1.0)
    assert all(visit.began_s is not None for visit in crowd.visits)
    assert crowd.door.admission.snapshot().callers == ()
