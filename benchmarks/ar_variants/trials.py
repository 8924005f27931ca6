"""Measures variants of token generation in alternating trials."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.ar_variants.processes import cpu_s
from benchmarks.ar_variants.workload import Outcome, Trial

TRIAL_S, MAX_REQUESTS = 0.8, 12
"""The shortest duration of a trial, unless it would need more than this number of requests."""
ALL_S, MIN_REPEATS, MAX_REPEATS = 20.0, 3, 11
"""The time for all repeats with one number of streams, and the limits of the number of repeats."""


@dataclass(frozen=True)
class Variant:
    """A variant. `front_end` is the id of the process between the engine's core and the consumer of the tokens."""

    name: str
    front_end: int
    run: Callable[[Trial], Outcome]


@dataclass
class Times:
    """The measurements of all variants with one number of streams, one value for each repeat."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    front_end_us: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Processor time of the front end for each token."""
    messages: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Messages for each token."""

    def time(self, variant: Variant, trial: Trial) -> float:
        """Runs a trial and returns its duration in seconds."""
        used_s = -cpu_s(variant.front_end)
        outcome = variant.run(trial)
        used_s += cpu_s(variant.front_end)
        self.tokens_per_s.setdefault(variant.name, []).append(outcome.tokens_per_s)
        self.front_end_us.setdefault(variant.name, []).append(used_s / outcome.tokens * 1e6)
        self.messages.setdefault(variant.name, []).append(outcome.messages / outcome.tokens)
        return outcome.seconds

    def ratio(self, variant: str, other: str) -> float:
        """Returns the speed of a variant relative to another: the median of the repeats' ratios."""
        return _median_ratio(self.tokens_per_s, variant, other)

    def front_end_ratio(self, variant: str, other: str) -> float:
        """Returns the processor time of a variant's front end for each token, relative to another."""
        return _median_ratio(self.front_end_us, variant, other)


def _median_ratio(values: Mapping[str, Sequence[float]], variant: str, other: str) -> float:
    return statistics.median(one / another for one, another in zip(values[variant], values[other], strict=True))


def run_trials(variants: Sequence[Variant], *, streams: int, name: str) -> Times:
    """Runs the variants' trials alternately, after a warm-up. `name` must be unique.

    Each repeat starts with another variant.
    """
    slowest_s = max(Times().time(variant, Trial(f"{name}-warm", streams)) for variant in variants)
    requests = min(MAX_REQUESTS, max(1, round(TRIAL_S / slowest_s)))
    times, repeat, end_s = Times(), 0, time.monotonic() + ALL_S
    while repeat < MIN_REPEATS or (repeat < MAX_REPEATS and time.monotonic() < end_s):
        for offset in range(len(variants)):
            times.time(variants[(offset + repeat) % len(variants)], Trial(f"{name}-{repeat}", streams, requests))
        repeat += 1
    return times
