"""How often a step says how far it is."""

from stagemesh.services.engines.base import Progress
from stagemesh.services.stage.step.outputs import PROGRESS_INTERVAL_S, ProgressThrottle


def test_progress_without_an_end_in_sight_is_told_now_and_then() -> None:
    times_s = iter(
        [0.0, PROGRESS_INTERVAL_S / 2, PROGRESS_INTERVAL_S, 1.2 * PROGRESS_INTERVAL_S, 3 * PROGRESS_INTERVAL_S]
    )
    pace = ProgressThrottle(clock=lambda: next(times_s))
    assert [pace.is_due(Progress(steps)) for steps in range(5)] == [True, False, True, False, True]


def test_progress_towards_an_end_is_told_whole() -> None:
    pace = ProgressThrottle(clock=lambda: 0.0)
    assert all(pace.is_due(Progress(steps, total_steps=3)) for steps in range(3))
