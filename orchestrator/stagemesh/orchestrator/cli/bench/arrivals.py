"""The arrival times of an open load: when each request is due, whether or not earlier requests have ended."""

import random
from collections.abc import Iterator
from enum import StrEnum
from itertools import count


class Arrivals(StrEnum):
    """The pattern in which requests arrive."""

    POISSON = "poisson"
    """Independent requests: the times between two arrivals are exponentially distributed."""
    UNIFORM = "uniform"
    """The same time between any two arrivals."""
    BURST = "burst"
    """Several requests at once, then none until the next burst."""


def arrival_times_s(pattern: Arrivals, *, rate_per_s: float, burst: int, seed: int) -> Iterator[float]:
    """Yields the times of arrivals without end, in seconds since the start of the load, in ascending order.

    - `rate_per_s` is the average number of arrivals per second in every pattern.
    - `burst` is the number of requests that arrive at once in the pattern BURST.
    - `seed` determines the times of the pattern POISSON.
    """
    match pattern:
        case Arrivals.POISSON:
            return _poisson_s(rate_per_s, random.Random(seed))  # noqa: S311 - reproducible times, not secrets
        case Arrivals.UNIFORM:
            return (index / rate_per_s for index in count())
        case Arrivals.BURST:
            return (index // burst * burst / rate_per_s for index in count())


def _poisson_s(rate_per_s: float, generator: random.Random) -> Iterator[float]:
    due_s = 0.0
    while True:
        due_s += generator.expovariate(rate_per_s)
        yield due_s
