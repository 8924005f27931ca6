"""Decides how a request recovers after stages are lost.

The functions decide which stages restart, whether each restarts from its checkpoint, and in which order the other
stages are rebound. They are pure: their results depend only on the request's graph and on the states of its stages.
`run` executes the resulting actions. Each stage counts its own attempts, and only lost stages restart. The attempt of a
flow is the higher of its producer's attempt and its consumer's attempt. Both stages must be notified of the flow's
attempt.

Producers resend their retained data to a restarted stage. A producer that no longer retains all of its data also
restarts from the beginning (`fresh`), and so do its own producers if necessary. A stage resumes from its checkpoint if
its consumers continue to run, because they have received the rows before the checkpoint.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias


class Phase(Enum):
    """The phase of a stage's newest attempt."""

    UNPLACED = "waits for a replica"
    PLACED = "waits for its upstream and downstream stages"
    STARTING = "is on its way to its replica"
    RUNNING = "runs"
    FINISHED = "has finished"


@dataclass(frozen=True)
class Flow:
    """The flow of tensors over one edge for one request."""

    edge: str
    producer: str
    consumer: str
    tensors: frozenset[str] = frozenset()
    """The names of the producer's tensors that the edge transfers. Empty if the edge transfers all tensors."""
    resumable: bool = True
    """Whether the producer may omit the first rows when it restarts. Its chunks then begin at other rows than before.
    """

    def carries(self, rows: Mapping[str, int]) -> bool:
        """Returns whether the edge transfers any of these rows. `rows` maps each tensor to a number of rows."""
        return any(self.carried(rows).values())

    def carried(self, rows: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the row counts of the tensors that the edge transfers. `rows` maps tensor names to row counts."""
        return {name: count for name, count in rows.items() if not self.tensors or name in self.tensors}


@dataclass(frozen=True)
class Graph:
    """The stages of a request, ordered so that producers precede consumers, and the flows between them."""

    stages: tuple[str, ...]
    flows: tuple[Flow, ...]
    output_stages: frozenset[str] = frozenset()
    """The names of the stages whose outputs the client receives."""
    incoming: Mapping[str, tuple[Flow, ...]] = field(init=False)
    outgoing: Mapping[str, tuple[Flow, ...]] = field(init=False)

    def __post_init__(self) -> None:
        by_consumer = {name: tuple(flow for flow in self.flows if flow.consumer == name) for name in self.stages}
        by_producer = {name: tuple(flow for flow in self.flows if flow.producer == name) for name in self.stages}
        object.__setattr__(self, "incoming", by_consumer)
        object.__setattr__(self, "outgoing", by_producer)


@dataclass
class AttemptState:
    """The state of a stage's newest attempt, as far as recovery depends on it."""

    attempt: int = 1
    phase: Phase = Phase.PLACED
    bound: Mapping[str, int] = field(default_factory=dict[str, int])
    """The flow attempt that was last sent to the step, by edge name."""
    first_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """The index of the first row that this attempt emits, by tensor. A missing tensor starts at row 0."""
    checkpoint_rows: Mapping[str, int] | None = None
    """The index of the first row that an attempt resumed from the checkpoint would emit, by tensor.

    None if there is no checkpoint.
    """


States: TypeAlias = Mapping[str, AttemptState]


@dataclass(frozen=True)
class Restart:
    """The decision to start a new attempt of a stage."""

    attempt: int
    resumes: bool
    """Whether the attempt resumes from the checkpoint. If False, it starts from the beginning."""


@dataclass(frozen=True)
class Restarts:
    """The consequences of a loss of stages: the stages to restart, and the checkpoints to discard."""

    restarted: Mapping[str, Restart]
    void: frozenset[str]
    """The stages whose checkpoint is useless from now on, because one of their consumers restarts from the first row.
    """
    unneeded: frozenset[str]
    """The lost stages that need not restart, because no other stage and no client needs their results."""


@dataclass(frozen=True)
class Place:
    """Action: choose a replica for the stage."""

    stage: str


@dataclass(frozen=True)
class Start:
    """Action: send the stage's newest attempt to its replica.

    Possible only if every consumer that has not finished already expects the attempt.
    """

    stage: str


@dataclass(frozen=True)
class RebindInputs:
    """Action: notify a running stage of the new producers on these edges."""

    stage: str
    edges: tuple[str, ...]


@dataclass(frozen=True)
class RebindOutputs:
    """Action: notify a stage of the new consumers on these edges. The consumers already expect the stage's data."""

    stage: str
    edges: tuple[str, ...]


Action: TypeAlias = Place | Start | RebindInputs | RebindOutputs


def attempt_of(flow: Flow, states: States) -> int:
    """Returns the attempt of a flow: the higher of its producer's attempt and its consumer's attempt."""
    return max(states[flow.producer].attempt, states[flow.consumer].attempt)


def is_checkpoint_useful(graph: Graph, states: States, stage: str, rows: Mapping[str, int]) -> bool:
    """Returns whether the stage could resume from a new checkpoint that follows the first `rows` of its tensors.

    Requires that every consumer has received the rows before the checkpoint, or is connected to the stage's current
    attempt and will receive them.
    """
    for flow in graph.outgoing[stage]:
        consumer = states[flow.consumer]
        receives = consumer.phase is Phase.FINISHED or (
            consumer.phase is Phase.RUNNING and consumer.bound.get(flow.edge) == states[stage].bound.get(flow.edge)
        )
        if flow.carries(rows) and not (flow.resumable and receives):
            return False
    return True


def plan_restarts(
    graph: Graph, states: States, *, lost: Collection[str], fresh: Collection[str] = frozenset()
) -> Restarts:
    """Returns the stages that must restart after a loss, and the consequences for the other stages.

    - `lost` are the stages whose steps were lost.
    - `fresh` are the stages that can no longer resend their data.
    """
    fallen = {stage for stage in lost if states[stage].phase is not Phase.FINISHED}
    unneeded = frozenset(stage for stage in fallen - set(fresh) if _is_unneeded(graph, states, stage, fresh))
    restarting = _with_producers(graph, states, (fallen | set(fresh)) - unneeded)
    restarted = {
        stage: Restart(
            attempt=1 + max(states[name].attempt for name in (stage, *_adjacent_stages(graph, stage))),
            resumes=stage not in fresh and _can_resume(graph, states, stage, restarting),
        )
        for stage in graph.stages
        if stage in restarting
    }
    void = frozenset(
        flow.producer
        for flow in graph.flows
        if flow.consumer in restarting and flow.carries(states[flow.producer].checkpoint_rows or {})
    )
    return Restarts(restarted, void, unneeded)


def next_actions(graph: Graph, states: States) -> list[Action]:
    """Returns all actions that are possible now.

    Further actions may become possible after these actions have completed.
    """
    return [action for stage in graph.stages for action in _actions_of(graph, states, stage)]


def is_open(flow: Flow, states: States) -> bool:
    """Returns whether the flow still has a consumer that can receive data, because the consumer has not finished."""
    return states[flow.consumer].phase is not Phase.FINISHED


def _actions_of(graph: Graph, states: States, stage: str) -> list[Action]:
    state = states[stage]
    match state.phase:
        case Phase.UNPLACED:
            return [Place(stage)]
        case Phase.PLACED:
            placed = all(states[flow.producer].phase is not Phase.UNPLACED for flow in graph.incoming[stage])
            expected = all(_is_expected(flow, states) for flow in graph.outgoing[stage] if is_open(flow, states))
            return [Start(stage)] if placed and expected else []
        case Phase.STARTING:
            return []
        case Phase.RUNNING | Phase.FINISHED:
            actions: list[Action] = []
            inputs = [flow for flow in graph.incoming[stage] if _is_stale(flow, states, stage)]
            inputs = [flow for flow in inputs if states[flow.producer].phase is not Phase.UNPLACED]
            if inputs and state.phase is Phase.RUNNING:
                actions.append(RebindInputs(stage, tuple(flow.edge for flow in inputs)))
            outputs = [flow for flow in graph.outgoing[stage] if _is_stale(flow, states, stage)]
            outputs = [flow for flow in outputs if _is_expected(flow, states)]
            if outputs:
                actions.append(RebindOutputs(stage, tuple(flow.edge for flow in outputs)))
            return actions


def _is_stale(flow: Flow, states: States, end: str) -> bool:
    return states[end].bound.get(flow.edge) != attempt_of(flow, states)


def _is_expected(flow: Flow, states: States) -> bool:
    """Returns whether the flow's consumer is running and was notified of the flow's current attempt."""
    return states[flow.consumer].phase is Phase.RUNNING and not _is_stale(flow, states, flow.consumer)


def _adjacent_stages(graph: Graph, stage: str) -> list[str]:
    return [flow.producer for flow in graph.incoming[stage]] + [flow.consumer for flow in graph.outgoing[stage]]


def _is_unneeded(graph: Graph, states: States, stage: str, restarting: Collection[str]) -> bool:
    consumers = [flow.consumer for flow in graph.outgoing[stage]]
    finished = all(states[name].phase is Phase.FINISHED and name not in restarting for name in consumers)
    return bool(consumers) and finished and stage not in graph.output_stages


def _with_producers(graph: Graph, states: States, restarting: Collection[str]) -> set[str]:
    """Returns `restarting` plus, transitively, the producers that must restart because they cannot send all rows.

    A producer that resumed from a checkpoint omitted the rows before it, and cannot send them to a restarted consumer.
    """
    found, pending = set(restarting), list(restarting)
    while pending:
        for flow in graph.incoming[pending.pop()]:
            if flow.producer not in found and flow.carries(states[flow.producer].first_rows):
                found.add(flow.producer)
                pending.append(flow.producer)
    return found


def _can_resume(graph: Graph, states: States, stage: str, restarting: Collection[str]) -> bool:
    rows = states[stage].checkpoint_rows
    if rows is None:
        return False
    received = (Phase.RUNNING, Phase.FINISHED)
    return all(
        flow.resumable and flow.consumer not in restarting and states[flow.consumer].phase in received
        for flow in graph.outgoing[stage]
        if flow.carries(rows)
    )
