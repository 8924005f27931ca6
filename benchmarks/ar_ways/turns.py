"""Measures ways to generate tokens, in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.ar_ways.processes import cpu_s
from benchmarks.ar_ways.workload import Outcome, Turn

TURN_S, MAX_REQUESTS = 0.8, 12
"""The least length of a turn, unless it would need more requests than the limit."""
ALL_S, MIN_REPEATS, MAX_REPEATS = 20.0, 3, 11
"""The time limit of all repeats for one number of streams, and the least and largest number of repeats."""


@dataclass(frozen=True)
class Way:
    """A way to generate tokens. `front_end` is the process between the engine's core and the client."""

    name: str
    front_end: int
    run: Callable[[Turn], Outcome]


@dataclass
class Times:
    """The results of all ways for one number of streams, by repeat."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    front_end_us: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """The processor time of the front end for a token."""
    messages: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """The time of a token."""

    def time(self, way: Way, turn: Turn) -> float:
        """Runs a turn and returns the seconds that it took."""
        used_s = -cpu_s(way.front_end)
        outcome = way.run(turn)
        used_s += cpu_s(way.front_end)
        self.tokens_per_s.setdefault(way.name, []).append(outcome.tokens_per_s)
        self.front_end_us.setdefault(way.name, []).append(used_s / outcome.tokens * 1e6)
        self.messages.setdefault(way.name, []).append(outcome.messages / outcome.tokens)
        return outcome.seconds

    def ratio(self, way: str, other: str) -> float:
        """Returns the speed of a way relative to another: the median of the repeats' ratios."""
        pairs = zip(self.tokens_per_s[way], self.tokens_per_s[other], strict=True)
        return statistics.median(one / another for one, another in pairs)


def take_turns(ways: Sequence[Way], *, streams: int, name: str) -> Times:
    """Runs the ways in turn after a warm-up. Each repeat starts with another way. `name` is unique to this call."""
    slowest_s = max(Times().time(way, Turn(f"{name}-warm", streams)) for way in ways)
    requests = min(MAX_REQUESTS, max(1, round(TURN_S / slowest_s)))
    times, repeat, end_s = Times(), 0, time.monotonic() + ALL_S
    while repeat < MIN_REPEATS or (repeat < MAX_REPEATS and time.monotonic() < end_s):
        for place in range(len(ways)):
            times.time(ways[(place + repeat) % len(ways)], Turn(f"{name}-{repeat}", streams, requests))
        repeat += 1
    return times
