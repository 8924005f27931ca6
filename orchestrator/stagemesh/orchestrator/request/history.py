"""Requests that have ended: sums over all of them, and the timelines of the last ones.

The notes of a request are added to the sums once, at its end. Nothing is counted for each output.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagemesh.orchestrator.request.timeline import RequestState, StepNotes, Timeline


@dataclass
class StageTotals:
    """Sums over the attempts of one stage, in all requests."""

    outputs: int = 0
    steps: int = 0
    finished: int = 0
    failed: int = 0

    def add(self, notes: StepNotes) -> None:
        """Adds an attempt as it is now."""
        self.outputs += notes.outputs
        self.steps += notes.steps
        self.finished += notes.finished is not None
        self.failed += notes.ended_s is not None and notes.finished is None


@dataclass
class EdgeTotals:
    """Sums over the flows of one edge whose producers have finished."""

    chunks: int = 0
    size_bytes: int = 0


class Totals:
    """Sums over requests by state, stage and edge."""

    def __init__(self) -> None:
        self.requests = Counter[RequestState]()
        self.stages: dict[str, StageTotals] = {}
        self.edges: dict[str, EdgeTotals] = {}

    def add(self, timeline: Timeline) -> None:
        """Adds a request as it is now."""
        self.requests[timeline.state] += 1
        for notes in timeline.steps:
            self.stages.setdefault(notes.stage, StageTotals()).add(notes)
            for usage in notes.finished.edges if notes.finished is not None else ():
                edge = self.edges.setdefault(usage.edge, EdgeTotals())
                edge.chunks += usage.chunks
                edge.size_bytes += usage.size_bytes

    def together_with(self, running: Iterable[Timeline]) -> "Totals":
        """Returns these sums plus the requests in `running`."""
        both = Totals()
        both.requests.update(self.requests)
        both.stages = {name: StageTotals(**vars(totals)) for name, totals in self.stages.items()}
        both.edges = {name: EdgeTotals(**vars(totals)) for name, totals in self.edges.items()}
        for timeline in running:
            both.add(timeline)
        return both


class History:
    """The timelines of the `keep` requests that ended last. Each takes a few kilobytes."""

    def __init__(self, *, keep: int = 512) -> None:
        self._keep = keep
        self._timelines: dict[str, Timeline] = {}

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self._timelines.values())

    def find(self, request_id: str) -> Timeline | None:
        """Returns the timeline of the last ended request with this id, or None."""
        return self._timelines.get(request_id)

    def add(self, timeline: Timeline) -> None:
        """Adds a request that has ended and drops the oldest one if there are more than `keep`."""
        self._timelines.pop(timeline.request_id, None)
        self._timelines[timeline.request_id] = timeline
        if len(self._timelines) > self._keep:
            del self._timelines[next(iter(self._timelines))]
