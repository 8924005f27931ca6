"""How much work a replica has left: what it last reported, brought up to now."""

import math
import time
from collections.abc import Callable

from stagemesh.common.notifier import Notifier

_SMOOTHING = 0.2
_FIRST_GUESS_S = 1.0


class StepCost:
    """Seconds of work that a step of a stage is, as the stage's replicas report it. Shared by all of them."""

    def __init__(self) -> None:
        self.seconds = _FIRST_GUESS_S
        self.known = False
        """Whether the stage's engine has ever estimated its work."""

    def learn(self, work_s: float, *, steps: int) -> None:
        """Takes in that so many steps are so much work; of no use where the engine does not estimate."""
        if work_s <= 0 or steps <= 0:
            return
        seen_s = work_s / steps
        self.seconds += (_SMOOTHING if self.known else 1.0) * (seen_s - self.seconds)
        self.known = True


class LoadEstimate:
    """One replica's work. Between two reports it is less by the time that passes, and more by what is placed."""

    def __init__(self, cost: StepCost, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        """Our requests that it works on."""
        self.idle = Notifier()
        """Fires when that has become 0."""
        self._cost = cost
        self._clock = clock
        self._reported_s = 0.0
        self._reported_at_s = 0.0
        self._unreported = 0
        self._report_number = 0

    @property
    def work_s(self) -> float:
        """Seconds of work left."""
        left_s = self._reported_s and max(0.0, self._reported_s - (self._clock() - self._reported_at_s))
        return left_s + self._unreported * self._cost.seconds

    @property
    def backlog_s(self) -> float:
        """What a new request should expect: the work left, and a step more for each of our requests there.

        An engine's estimate holds little of those that wait for their input, and is a guess of all.
        """
        return self.work_s + self.running * self._cost.seconds

    def report(self, work_s: float, *, steps: int) -> None:
        """The replica says what it has left, in so many steps. An engine that does not estimate leaves `work_s` 0."""
        # One that no clock can count is no estimate: it would spoil what all replicas of the stage learn.
        work_s = work_s if math.isfinite(work_s) else 0.0
        self._cost.learn(work_s, steps=steps)
        self._reported_s = work_s if self._cost.known else steps * self._cost.seconds
        self._reported_at_s = self._clock()
        # Of ours it has seen no more than all its steps: the others are still on their way.
        self._unreported = max(0, self.running - steps)
        self._report_number += 1

    def place(self) -> Callable[[], None]:
        """Counts a request that goes there, and returns what takes it off again; calling that twice is harmless."""
        self.running += 1
        self._unreported += 1
        number, released = self._report_number, False

        def release() -> None:
            nonlocal released
            if released:
                return
            released = True
            self.running -= 1
            unreported = self._unreported - (number == self._report_number)
            self._unreported = max(0, min(unreported, self.running))
            if not self.running:
                self.idle.fire()

        return release
