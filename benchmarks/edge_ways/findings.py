"""The results of a run: times of ways that take turns, and figures derived from them."""

import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console

from benchmarks.edge_ways.worker import WorkerError
from benchmarks.report import Figure

ROUNDS = 9
_console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
_begun_s = time.monotonic()


class Probe(Protocol):
    """Sends messages by one way."""

    def __call__(self, *, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds of each message."""
        ...


class Times:
    """The median of each round in seconds, by way and size."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, int], list[float]] = {}

    def measure(self, probes: Mapping[str, Probe], counts: Mapping[int, int], findings: "Findings") -> None:
        """Measures all ways in turn, with `counts[size_bytes]` messages in a turn. A way that fails is left out."""
        for size_bytes, count in counts.items():
            say(f"{size_text(size_bytes)}: {', '.join(probes)}")
            for _ in range(ROUNDS):
                for way, probe in probes.items():
                    if way not in findings.broken:
                        with findings.noting(way):
                            median_s = statistics.median(probe(size_bytes=size_bytes, count=count))
                            self._rounds.setdefault((way, size_bytes), []).append(median_s)

    @property
    def ways(self) -> list[str]:
        """All ways that were measured."""
        return list(dict.fromkeys(way for way, _ in self._rounds))

    def figures(self) -> list[Figure]:
        """Returns the times of all ways."""
        return [
            Figure(f"{way}, {size_text(size)}", self.median_us(way, size), "µs", subject="one message, one way")
            for way, size in self._rounds
        ]

    def has(self, way: str, size_bytes: int) -> bool:
        """Returns whether a way was measured at a size."""
        return (way, size_bytes) in self._rounds

    def median_us(self, way: str, size_bytes: int) -> float:
        """Returns the median time of a message in microseconds."""
        return statistics.median(self._rounds[way, size_bytes]) * 1e6

    def ratio(self, above: str, below: str, size_bytes: int) -> float:
        """Returns the ratio of the times of two ways: the median of the rounds' ratios."""
        pairs = zip(self._rounds[above, size_bytes], self._rounds[below, size_bytes], strict=True)
        return statistics.median(one / other for one, other in pairs)


@dataclass
class Findings:
    """The figures, and the reasons of those that could not be measured."""

    figures: list[Figure] = field(default_factory=list[Figure])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    broken: dict[str, str] = field(default_factory=dict[str, str])
    """The ways that do not work here, with the reason."""

    def add(
        self, name: str, value: Callable[[], float], unit: str, *, subject: str, other: str = "", goal: str = ""
    ) -> None:
        """Adds a figure of the way `subject` with the baseline `other`, or leaves it out if one of them fails."""
        reasons = [self.broken[way] for way in (subject, other) if way in self.broken]
        if reasons:
            self.left_out[f"{subject}: {name}"] = reasons[0]
            return
        with self.noting(subject):
            self.figures.append(Figure(name, value(), unit, goal, subject))
            return
        self.left_out[f"{subject}: {name}"] = self.broken[subject]

    @contextmanager
    def noting(self, way: str) -> Generator[None]:
        """Records a failure of a way, so that the measurement continues with the others."""
        try:
            yield
        except WorkerError as exc:
            say(f"{way} fails: {exc}")
            self.broken[way] = str(exc)

    def by_subject(self) -> list[Figure]:
        """Returns the figures grouped by subject, in the order in which the subjects first occurred."""
        subjects = list(dict.fromkeys(figure.subject for figure in self.figures))
        return sorted(self.figures, key=lambda figure: subjects.index(figure.subject))


def say(text: str) -> None:
    """Prints a line of progress."""
    _console.print(f"{time.monotonic() - _begun_s:4.0f} s  {text}")


def size_text(size_bytes: int) -> str:
    """Returns a size in KiB or MiB."""
    return f"{size_bytes >> 20} MiB" if size_bytes >> 20 else f"{size_bytes >> 10} KiB"
