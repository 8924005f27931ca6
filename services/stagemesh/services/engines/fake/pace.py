"""When the steps of a task are over."""

import math
from collections.abc import Callable


class Pace:
    """The time of steps that follow each other, by a clock in seconds.

    One that `keeps` makes up with each step for what the one before was late by, so that a rate is kept; it does not
    hurry after a longer wait. Otherwise each step takes its time from when it begins.
    """

    def __init__(self, *, keeps: bool, clock: Callable[[], float]) -> None:
        self._keeps, self._clock = keeps, clock
        self._due_s = -math.inf

    def pause_s(self, duration_s: float) -> float:
        """How long to wait until a step that begins now is over."""
        now_s = self._clock()
        makes_up = self._keeps and now_s - self._due_s < duration_s
        self._due_s = (self._due_s if makes_up else now_s) + duration_s
        return self._due_s - now_s
