"""What is to be done when parts of a request are lost: which stages run anew, from where, and who is told of it when.

Pure functions of the request's graph and of how its stages stand; `request_run` carries out what they say. Every stage
has attempts of its own, and only the stages that were lost run anew. A flow's attempt is the higher one of its two
ends', and both must have been told it. A stage that runs anew is fed from what its producers keep; where that is gone
they run anew too (`fresh`), and so on up the graph. It resumes from its checkpoint where its consumers go on, for they
have taken the rows before it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias


class Phase(Enum):
    """How far an attempt at a stage's share is."""

    UNPLACED = "waits for a replica"
    PLACED = "waits for its neighbours"
    STARTING = "is on its way to its replica"
    RUNNING = "runs"
    FINISHED = "is done"


@dataclass(frozen=True)
class Flow:
    """What an edge carries for one request."""

    edge: str
    producer: str
    consumer: str
    tensors: frozenset[str] = frozenset()
    """Those of the producer that it carries; empty for all."""
    resumable: bool = True
    """Whether it may begin behind the first row: chunks are then cut otherwise than before."""

    def carries(self, rows: Mapping[str, int]) -> bool:
        """Whether any of these rows, by tensor, would have come over it."""
        return any(self.carried(rows).values())

    def carried(self, rows: Mapping[str, int]) -> Mapping[str, int]:
        """Those of these rows, by tensor, that come over it."""
        return {name: count for name, count in rows.items() if not self.tensors or name in self.tensors}


@dataclass(frozen=True)
class Graph:
    """A request's stages, producers before consumers, and its flows."""

    stages: tuple[str, ...]
    flows: tuple[Flow, ...]
    heard: frozenset[str] = frozenset()
    """The stages of which the client hears something."""
    incoming: Mapping[str, tuple[Flow, ...]] = field(init=False)
    outgoing: Mapping[str, tuple[Flow, ...]] = field(init=False)

    def __post_init__(self) -> None:
        by_consumer = {name: tuple(flow for flow in self.flows if flow.consumer == name) for name in self.stages}
        by_producer = {name: tuple(flow for flow in self.flows if flow.producer == name) for name in self.stages}
        object.__setattr__(self, "incoming", by_consumer)
        object.__setattr__(self, "outgoing", by_producer)


@dataclass
class Share:
    """One stage's part in a request, as its newest attempt stands."""

    attempt: int = 1
    phase: Phase = Phase.PLACED
    told: Mapping[str, int] = field(default_factory=dict[str, int])
    """By edge, the attempt of its flow as the step knows it."""
    first_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """By tensor, the rows before the first that this attempt emits."""
    kept_rows: Mapping[str, int] | None = None
    """By tensor, the rows before those that an attempt resumed from its checkpoint would emit; None without one."""


Shares: TypeAlias = Mapping[str, Share]


@dataclass(frozen=True)
class Restart:
    """A stage runs anew."""

    attempt: int
    resumes: bool
    """From its checkpoint, and not from the start."""


@dataclass(frozen=True)
class Restarts:
    """What follows from a loss."""

    anew: Mapping[str, Restart]
    void: frozenset[str]
    """The stages whose checkpoint is of no use any more, because a consumer begins at the first row again."""
    over: frozenset[str]
    """Lost stages from which nobody waits for anything."""


@dataclass(frozen=True)
class Place:
    """A stage's attempt needs a replica."""

    stage: str


@dataclass(frozen=True)
class Start:
    """A stage's attempt may be sent to its replica; its consumers expect it, but for those that are done."""

    stage: str


@dataclass(frozen=True)
class RebindInputs:
    """A running stage is to expect other producers."""

    stage: str
    edges: tuple[str, ...]


@dataclass(frozen=True)
class RebindOutputs:
    """A stage is to feed other consumers, which expect it."""

    stage: str
    edges: tuple[str, ...]


Action: TypeAlias = Place | Start | RebindInputs | RebindOutputs


def attempt_of(flow: Flow, shares: Shares) -> int:
    """The attempt by which the two ends of a flow are to know it."""
    return max(shares[flow.producer].attempt, shares[flow.consumer].attempt)


def can_keep(graph: Graph, shares: Shares, stage: str, rows: Mapping[str, int]) -> bool:
    """Whether a checkpoint that a stage made just now, after these rows, is of use: its consumers get them from it."""
    for flow in graph.outgoing[stage]:
        consumer = shares[flow.consumer]
        fed = consumer.phase is Phase.FINISHED or (
            consumer.phase is Phase.RUNNING and consumer.told.get(flow.edge) == shares[stage].told.get(flow.edge)
        )
        if flow.carries(rows) and not (flow.resumable and fed):
            return False
    return True


def restarts(graph: Graph, shares: Shares, *, lost: Collection[str], fresh: Collection[str] = frozenset()) -> Restarts:
    """Which stages run anew when the steps of some are `lost`, and others cannot give what they gave: `fresh`."""
    fallen = {stage for stage in lost if shares[stage].phase is not Phase.FINISHED}
    over = frozenset(stage for stage in fallen - set(fresh) if _is_needless(graph, shares, stage, fresh))
    anew = _with_producers(graph, shares, (fallen | set(fresh)) - over)
    chosen = {
        stage: Restart(
            attempt=1 + max(shares[name].attempt for name in (stage, *_neighbours(graph, stage))),
            resumes=stage not in fresh and _may_resume(graph, shares, stage, anew),
        )
        for stage in graph.stages
        if stage in anew
    }
    void = frozenset(
        flow.producer
        for flow in graph.flows
        if flow.consumer in anew and flow.carries(shares[flow.producer].kept_rows or {})
    )
    return Restarts(chosen, void, over)


def next_actions(graph: Graph, shares: Shares) -> list[Action]:
    """All that may be done now; the rest waits for some of it."""
    return [action for stage in graph.stages for action in _actions_of(graph, shares, stage)]


def is_open(flow: Flow, shares: Shares) -> bool:
    """Whether somebody reads the flow still."""
    return shares[flow.consumer].phase is not Phase.FINISHED


def _actions_of(graph: Graph, shares: Shares, stage: str) -> list[Action]:
    share = shares[stage]
    match share.phase:
        case Phase.UNPLACED:
            return [Place(stage)]
        case Phase.PLACED:
            placed = all(shares[flow.producer].phase is not Phase.UNPLACED for flow in graph.incoming[stage])
            expected = all(_is_expected(flow, shares) for flow in graph.outgoing[stage] if is_open(flow, shares))
            return [Start(stage)] if placed and expected else []
        case Phase.STARTING:
            return []
        case Phase.RUNNING | Phase.FINISHED:
            actions: list[Action] = []
            inputs = [flow for flow in graph.incoming[stage] if _is_stale(flow, shares, stage)]
            inputs = [flow for flow in inputs if shares[flow.producer].phase is not Phase.UNPLACED]
            if inputs and share.phase is Phase.RUNNING:
                actions.append(RebindInputs(stage, tuple(flow.edge for flow in inputs)))
            outputs = [flow for flow in graph.outgoing[stage] if _is_stale(flow, shares, stage)]
            outputs = [flow for flow in outputs if _is_expected(flow, shares)]
            if outputs:
                actions.append(RebindOutputs(stage, tuple(flow.edge for flow in outputs)))
            return actions


def _is_stale(flow: Flow, shares: Shares, end: str) -> bool:
    return shares[end].told.get(flow.edge) != attempt_of(flow, shares)


def _is_expected(flow: Flow, shares: Shares) -> bool:
    """Whether the flow's consumer runs and waits for it."""
    return shares[flow.consumer].phase is Phase.RUNNING and not _is_stale(flow, shares, flow.consumer)


def _neighbours(graph: Graph, stage: str) -> list[str]:
    return [flow.producer for flow in graph.incoming[stage]] + [flow.consumer for flow in graph.outgoing[stage]]


def _is_needless(graph: Graph, shares: Shares, stage: str, restarting: Collection[str]) -> bool:
    consumers = [flow.consumer for flow in graph.outgoing[stage]]
    done = all(shares[name].phase is Phase.FINISHED and name not in restarting for name in consumers)
    return bool(consumers) and done and stage not in graph.heard


def _with_producers(graph: Graph, shares: Shares, anew: Collection[str]) -> set[str]:
    """And the producers that could not feed those stages from the first row on, for they resumed behind it."""
    found, pending = set(anew), list(anew)
    while pending:
        for flow in graph.incoming[pending.pop()]:
            if flow.producer not in found and flow.carries(shares[flow.producer].first_rows):
                found.add(flow.producer)
                pending.append(flow.producer)
    return found


def _may_resume(graph: Graph, shares: Shares, stage: str, anew: Collection[str]) -> bool:
    rows = shares[stage].kept_rows
    if rows is None:
        return False
    taken = (Phase.RUNNING, Phase.FINISHED)
    return all(
        flow.resumable and flow.consumer not in anew and shares[flow.consumer].phase in taken
        for flow in graph.outgoing[stage]
        if flow.carries(rows)
    )
