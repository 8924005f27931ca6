"""Statistics of ended requests: totals over all of them, and the timelines of the most recent ones.

A request is added to the totals once, when it ends. No counter is updated for each output.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagemesh.orchestrator.request.timeline import RequestState, StepNotes, Timeline


@dataclass
class StageTotals:
    """The numbers of outputs, engine steps, and finished and failed attempts of one stage, summed over all requests."""

    outputs: int = 0
    steps: int = 0
    finished: int = 0
    failed: int = 0

    def add(self, notes: StepNotes) -> None:
        """Adds the counts of one attempt."""
        self.outputs += notes.outputs
        self.steps += notes.steps
        self.finished += notes.finished is not None
        self.failed += notes.ended_s is not None and notes.finished is None


@dataclass
class EdgeTotals:
    """The chunks and bytes that one edge has transferred in all requests. Counted when the edge's producer finishes."""

    chunks: int = 0
    size_bytes: int = 0


class Totals:
    """Sums over requests: the number of requests by state, and the work by stage and by edge."""

    def __init__(self) -> None:
        self.requests = Counter[RequestState]()
        self.stages: dict[str, StageTotals] = {}
        self.edges: dict[str, EdgeTotals] = {}

    def add(self, timeline: Timeline) -> None:
        """Adds a request in its current state, with the work of its attempts so far."""
        self.requests[timeline.state] += 1
        for notes in timeline.steps:
            self.stages.setdefault(notes.stage, StageTotals()).add(notes)
            for usage in notes.finished.edges if notes.finished is not None else ():
                edge = self.edges.setdefault(usage.edge, EdgeTotals())
                edge.chunks += usage.chunks
                edge.size_bytes += usage.size_bytes

    def together_with(self, running: Iterable[Timeline]) -> "Totals":
        """Returns new totals that also include the requests in `running`. Leaves these totals unchanged."""
        both = Totals()
        both.requests.update(self.requests)
        both.stages = {name: StageTotals(**vars(totals)) for name, totals in self.stages.items()}
        both.edges = {name: EdgeTotals(**vars(totals)) for name, totals in self.edges.items()}
        for timeline in running:
            both.add(timeline)
        return both


class History:
    """Retains the timelines of the last `keep` requests that ended. A timeline needs a few kilobytes."""

    def __init__(self, *, keep: int = 512) -> None:
        self._keep = keep
        self._timelines: dict[str, Timeline] = {}

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self._timelines.values())

    def find(self, request_id: str) -> Timeline | None:
        """Returns the timeline of the ended request with this id, or None if there is none.

        If several had the id, the last.
        """
        return self._timelines.get(request_id)

    def add(self, timeline: Timeline) -> None:
        """Adds the timeline of a request that has ended. Drops the oldest timeline if there are more than `keep`."""
        self._timelines.pop(timeline.request_id, None)
        self._timelines[timeline.request_id] = timeline
        if len(self._timelines) > self._keep:
            del self._timelines[next(iter(self._timelines))]
