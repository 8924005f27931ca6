"""Measures the time between the rows that engines emit."""

import time
from collections.abc import Callable, Mapping

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
