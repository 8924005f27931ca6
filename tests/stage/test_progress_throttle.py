"""How often a step reports progress."""

from stagemesh.services.engines.base import Progress
from stagemesh.services.stage.step.outputs import PROGRESS_INTERVAL_S, ProgressThrottle


def test_progress_without_a_total_is_throttled() -> None:
    times_s = iter(
        [0.0, PROGRESS_INTERVAL_S / 2, PROGRESS_INTERVAL_S, 1.2 * PROGRESS_INTERVAL_S, 3 * PROGRESS_INTERVAL_S]
    )
    pace = ProgressThrottle(clock=lambda: next(times_s))
    assert [pace.is_due(Progress(steps)) for steps in range(5)] == [True, False, True, False, True]


def test_progress_with_a_total_is_always_reported() -> None:
    pace = ProgressThrottle(clock=lambda: 0.0)
    assert all(pace.is_due(Progress(steps, total_steps=3)) for steps in range(3))
