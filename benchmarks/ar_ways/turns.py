"""Ways to have tokens made, taking turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.ar_ways.processes import cpu_s
from benchmarks.ar_ways.workload import Outcome, Turn

TURN_S, MAX_REQUESTS = 0.8, 12
"""How long a turn lasts at least, unless its streams would make more requests than that."""
ALL_S, MIN_REPEATS, MAX_REPEATS = 20.0, 3, 11
"""How long all repeats with so many streams may last, within these numbers of them."""


@dataclass(frozen=True)
class Way:
    """Runs turns; `front_end` is the process between the engine's core and whoever takes the tokens."""

    name: str
    front_end: int
    run: Callable[[Turn], Outcome]


@dataclass
class Times:
    """What was seen of the ways with so many streams, repeat by repeat."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    front_end_us: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Processor time of the front end, a token."""
    messages: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """A token."""

    def time(self, way: Way, turn: Turn) -> float:
        """Runs a turn, and returns the seconds that it took."""
        used_s = -cpu_s(way.front_end)
        outcome = way.run(turn)
        used_s += cpu_s(way.front_end)
        self.tokens_per_s.setdefault(way.name, []).append(outcome.tokens_per_s)
        self.front_end_us.setdefault(way.name, []).append(used_s / outcome.tokens * 1e6)
        self.messages.setdefault(way.name, []).append(outcome.messages / outcome.tokens)
        return outcome.seconds

    def ratio(self, way: str, other: str) -> float:
        """How fast a way is in terms of another: the median of the repeats' ratios."""
        pairs = zip(self.tokens_per_s[way], self.tokens_per_s[other], strict=True)
        return statistics.median(one / another for one, another in pairs)


def take_turns(ways: Sequence[Way], *, streams: int, name: str) -> Times:
    """Lets the ways take turns, each time another first. They are warmed up before; `name` is for no other call."""
    slowest_s = max(Times().time(way, Turn(f"{name}-warm", streams)) for way in ways)
    requests = min(MAX_REQUESTS, max(1, round(TURN_S / slowest_s)))
    times, repeat, end_s = Times(), 0, time.monotonic() + ALL_S
    while repeat < MIN_REPEATS or (repeat < MAX_REPEATS and time.monotonic() < end_s):
        for place in range(len(ways)):
            times.time(ways[(place + repeat) % len(ways)], Turn(f"{name}-{repeat}", streams, requests))
        repeat += 1
    return times
