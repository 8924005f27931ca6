"""What became of all requests since the orchestrator started.

Notes of running requests count as they stand; those of a request that ended are added up once, so that nothing is
counted for each output.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from stagemesh.orchestrator.request.timeline import RequestState, StepNotes, Timeline


@dataclass
class StageTotals:
    """One stage's share of all requests."""

    outputs: int = 0
    steps: int = 0
    finished: int = 0
    failed: int = 0

    def add(self, notes: StepNotes) -> None:
        """Adds an attempt as it stands."""
        self.outputs += notes.outputs
        self.steps += notes.steps
        self.finished += notes.finished is not None
        self.failed += notes.ended_s is not None and notes.finished is None


@dataclass
class EdgeTotals:
    """What an edge has carried for producers that are done."""

    chunks: int = 0
    size_bytes: int = 0


class Totals:
    """Sums by state, stage and edge."""

    def __init__(self) -> None:
        self.requests = Counter[RequestState]()
        self.stages: dict[str, StageTotals] = {}
        self.edges: dict[str, EdgeTotals] = {}

    def add(self, timeline: Timeline) -> None:
        """Adds a request as it stands."""
        self.requests[timeline.state] += 1
        for notes in timeline.steps:
            self.stages.setdefault(notes.stage, StageTotals()).add(notes)
            for usage in notes.finished.edges if notes.finished is not None else ():
                edge = self.edges.setdefault(usage.edge, EdgeTotals())
                edge.chunks += usage.chunks
                edge.size_bytes += usage.size_bytes

    def together_with(self, running: Iterable[Timeline]) -> "Totals":
        """These, and requests that have not ended."""
        both = Totals()
        both.requests.update(self.requests)
        both.stages = {name: StageTotals(**vars(totals)) for name, totals in self.stages.items()}
        both.edges = {name: EdgeTotals(**vars(totals)) for name, totals in self.edges.items()}
        for timeline in running:
            both.add(timeline)
        return both
