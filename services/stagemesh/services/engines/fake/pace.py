"""When the steps of a task are over."""

import math
from collections.abc import Callable


class Pace:
    """The time of steps that follow each other, by a clock in seconds.

    One that `keeps` makes up with each step for what the one before was late by, so that a rate is kept. After a longer
    wait it does not hurry, but falls in with the beat that it had: many that were held up together do not go on in one.
    Otherwise each step takes its time from when it begins.
    """

    def __init__(self, *, keeps: bool, clock: Callable[[], float]) -> None:
        self._keeps, self._clock = keeps, clock
        self._due_s = -math.inf

    def pause_s(self, duration_s: float) -> float:
        """How long to wait until a step that begins now is over."""
        now_s = self._clock()
        late_s = now_s - self._due_s
        keeps = self._keeps and math.isfinite(late_s)
        self._due_s = (now_s - math.fmod(late_s, duration_s) if keeps and duration_s else now_s) + duration_s
        return self._due_s - now_s
