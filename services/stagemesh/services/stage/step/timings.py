"""The timings of a step, and the time between the rows that engines emit."""

import time
from collections.abc import Callable, Mapping

from stagemesh.v1 import request_pb2

_WEIGHT = 0.2
"""The weight of the newest step in a moving average."""


class FrameIntervals:
    """The mean time between two rows of each emitted tensor: moving averages over the steps of a replica."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """The time between two rows in seconds, by the name of the tensor."""

    def add(self, rows: Mapping[str, int], *, took_s: float) -> None:
        """Adds a step whose engine emitted `rows`, by the name of the tensor, in `took_s` seconds."""
        for name, count in rows.items():
            if count > 0 and took_s > 0:
                former_s = self.seconds.get(name, took_s / count)
                self.seconds[name] = former_s + _WEIGHT * (took_s / count - former_s)


class RowTimer:
    """Measures the time in which the engine of one step emits its rows, after its first packet.

    The time in which a packet waits for a consumer does not count.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[str, int] | None = None
        self._resumed_s = self._took_s = 0.0

    def emitted(self, rows: Mapping[str, int]) -> None:
        """Notes a packet. `rows` are the rows that the step has emitted so far, by the name of the tensor."""
        if self._first is None:
            self._first = dict(rows)
        else:
            self._took_s += self._clock() - self._resumed_s

    def resumed(self) -> None:
        """Notes that the packet is sent, so that the engine continues."""
        self._resumed_s = self._clock()

    def report(self, rows: Mapping[str, int], to: FrameIntervals) -> None:
        """Adds the rows after the first packet to `to`. `rows` are all rows of the step, by the name of the tensor."""
        if self._first is not None:
            later = {name: count - self._first.get(name, 0) for name, count in rows.items()}
            to.add(later, took_s=self._took_s)


class Stopwatch:
    """Measures the timings of a step on the monotonic clock. All times are in seconds since construction."""

    def __init__(self) -> None:
        self._accepted_s = time.monotonic()
        self.started_s: float | None = None
        """The time at which the engine received its first input, in seconds since construction. None if the engine has
        not received any input."""
        self._first_output_s: float | None = None

    @property
    def age_s(self) -> float:
        """The time since construction, in seconds. The step is accepted at construction."""
        return time.monotonic() - self._accepted_s

    def start(self) -> None:
        """Records the time at which the engine received its first input. Ignores later calls."""
        if self.started_s is None:
            self.started_s = self.age_s

    def first_output(self) -> None:
        """Records the time at which the engine emitted its first output. Ignores later calls."""
        if self._first_output_s is None:
            self._first_output_s = self.age_s

    def timings(self) -> request_pb2.Timings:
        """Returns the step's timings. Call at the end of the step, because the current time is recorded as the end."""
        return request_pb2.Timings(started_s=self.started_s, first_output_s=self._first_output_s, finished_s=self.age_s)
