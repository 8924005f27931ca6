"""How often a step reports progress."""

import pytest

from stagemesh.services.engines.base import Progress
from stagemesh.services.stage.step.outputs import PROGRESS_INTERVAL_S, STEPS_INTERVAL_S, ProgressThrottle


@pytest.mark.parametrize(("total_steps", "interval_s"), [(None, PROGRESS_INTERVAL_S), (9, STEPS_INTERVAL_S)])
def test_progress_is_limited(total_steps: int | None, interval_s: float) -> None:
    times_s = iter([0.0, interval_s / 2, interval_s, 1.2 * interval_s, 3 * interval_s])
    throttle = ProgressThrottle(clock=lambda: next(times_s))
    due = [throttle.is_due(Progress(steps, total_steps=total_steps)) for steps in range(5)]
    assert due == [True, False, True, False, True]


def test_the_last_of_a_known_number_of_steps_is_always_reported() -> None:
    throttle = ProgressThrottle(clock=lambda: 0.0)
    assert [throttle.is_due(Progress(steps, total_steps=3)) for steps in range(1, 4)] == [True, False, True]
