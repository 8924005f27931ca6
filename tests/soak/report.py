"""The results of a soak."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

from tests.soak.delivery import Flaws

MEDIAN_RESUME_S = 1.0
"""The limit for the pause after a kill, in excess of the pauses of untouched requests: a busy machine pauses too."""
UNTOUCHED = "nothing"
"""The kind of requests that no fault has hit."""


@dataclass(frozen=True)
class Report:
    """The figures and the problems of a soak."""

    requests: int
    failed: Mapping[str, str]
    """The errors of failed requests, by request."""
    flawed: Mapping[str, Flaws]
    """The flaws of deliveries, by request."""
    timelines: Mapping[str, object]
    """The orchestrator's notes on failed or flawed requests."""
    faults: Mapping[str, int]
    """The numbers of faults by kind."""
    blows: Mapping[int, int]
    """The number of times that faults hit, by the number of processes that they hit at the same time."""
    missed_faults: Sequence[str]
    pause_s: Mapping[str, Sequence[float]]
    """The seconds for which the client of each hit request waited longer than usual, by kind of fault."""
    growth: Sequence[str]
    """A text for each process whose memory or number of open files grew."""
    orchestrator_mb: Sequence[int]
    """The measured memory of the orchestrator in MB, over time."""
    left: Sequence[str]
    """Resources that were not released: steps, arenas, requests, shared memory."""
    slowest_s: float

    @property
    def flaws(self) -> Flaws:
        """The flaws of all deliveries, added up."""
        return sum(self.flawed.values(), Flaws())

    def problems(self) -> list[str]:
        """The reasons for which the soak fails; empty if it passes."""
        return [
            *(f"request {name} failed: {error}" for name, error in self.failed.items()),
            *(f"request {name}: {flaws}" for name, flaws in self.flawed.items()),
            *(f"a fault that did not happen: {missed}" for missed in self.missed_faults),
            *self._slow(),
            *self.growth,
            *(f"left behind: {what}" for what in self.left),
        ]

    def summary(self) -> str:
        """Returns the figures as a text."""
        flaws = self.flaws
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())) or "none"
        lines = [
            f"{sum(self.faults.values())} faults ({faults}), {len(self.missed_faults)} missed",
            "processes hit at once: " + ", ".join(f"{size} {n} times" for size, n in sorted(self.blows.items())),
            f"{self.requests} requests: {len(self.failed)} failed; slowest {self.slowest_s:.1f} s",
            "units: " + ", ".join(f"{count} {flaw}" for flaw, count in asdict(flaws).items()),
        ]
        for kind, times_s in sorted(self.pause_s.items()):
            ninth = quantiles(times_s, n=10)[-1] if len(times_s) > 1 else times_s[0]
            lines.append(
                f"to resume after {kind}: median {median(times_s):.2f} s, p90 {ninth:.2f} s, "
                f"longest {max(times_s):.2f} s of {len(times_s)}"
            )
        if self.orchestrator_mb:
            began, ended = self.orchestrator_mb[0], self.orchestrator_mb[-1]
            lines.append(f"memory of the orchestrator: {began} MB, at most {max(self.orchestrator_mb)} MB, {ended} MB")
        return "\n".join([*lines, *(f"! {problem}" for problem in self.problems())])

    def json(self) -> str:
        """Returns all figures as JSON."""
        return json.dumps({**asdict(self), "problems": self.problems()}, indent=2)

    def _slow(self) -> list[str]:
        killed_s, usual_s = self.pause_s.get("kill", ()), self.pause_s.get(UNTOUCHED, ())
        # If all replicas of a stage are killed at the same time, the pause has the time of their restart.
        if not killed_s or not usual_s or max(self.blows, default=1) > 1:
            return []
        killed, usual = median(killed_s), median(usual_s)
        if killed - usual < MEDIAN_RESUME_S:
            return []
        return [f"the median pause after a kill is {killed:.2f} s, and {usual:.2f} s without a fault"]
