"""A histogram that costs less for each value than that of prometheus-client, which has a lock and labels."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Counts values by intervals. `bounds` are the upper bounds of the intervals, in ascending order.

    Values above the last bound form an interval of their own. Use it on one thread.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        """The sum of all values."""

    def add(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yields each upper bound as text, and the number of values up to it. The last bound is "+Inf"."""
        return zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True)
