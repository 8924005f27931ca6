"""Decides how a request recovers after stages are lost.

`StepState` is the state of one stage of a request. The functions of this module decide which stages restart, whether
each of them restarts from its checkpoint, and in which order the other stages are rebound. The functions are pure:
their results depend only on the request's route and on the states of its stages. The module `run` executes the
resulting actions.

Each stage counts its own attempts, and only lost stages restart. The attempt of a flow is the higher of its producer's
attempt and its consumer's attempt. Both stages must be notified of the flow's attempt.

Producers resend their retained data to a restarted stage. A producer that no longer retains all of its data also
restarts from the beginning (`fresh`), and so do its own producers if necessary. A stage can resume from its checkpoint
only if its consumers continue to run, because these consumers have already received the rows before the checkpoint.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from stagemesh.common.wire.chunk_sizes import StepPolicy, WholePolicy
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.checkpoint_budget import CheckpointBudget
from stagemesh.orchestrator.planning.planner import PlannedStep
from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.pipeline import Edge, Route
from stagemesh.v1 import stage_pb2


class Phase(Enum):
    """The phase of a stage's newest attempt."""

    UNPLACED = "waits for a replica"
    PLACED = "waits for its upstream and downstream stages"
    STARTING = "is on its way to its replica"
    RUNNING = "runs"
    FINISHED = "has finished"


@dataclass
class AttemptState:
    """The part of a stage's state on which recovery decisions depend."""

    attempt: int = 1
    phase: Phase = Phase.PLACED
    bound: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of the flow attempt that was last sent to the step, by edge name."""
    first_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """The index of the first row that this attempt emits, by tensor name. A tensor without an entry starts at row 0."""
    checkpoint_rows: Mapping[str, int] | None = None
    """The index of the first row that an attempt resumed from the checkpoint would emit, by tensor name.

    None if there is no checkpoint.
    """


@dataclass(frozen=True)
class Restart:
    """The decision to start a new attempt of a stage."""

    attempt: int
    resumes: bool
    """Whether the attempt resumes from the checkpoint. If False, the attempt starts from the beginning."""


@dataclass(frozen=True)
class SupersededAttempt:
    """An attempt that a newer attempt has replaced, and the replica that may still execute the old attempt."""

    replica: Replica
    attempt: int


@dataclass(eq=False, kw_only=True)
class StepState(AttemptState):
    """The full state of one stage of a request: its newest attempt, and values that persist across attempts."""

    step: PlannedStep
    budget: CheckpointBudget
    """The budget that limits the total size of the checkpoints of all requests."""
    notes: StepNotes | None = None
    checkpoint: stage_pb2.Checkpoint | None = None
    """The newest checkpoint from which the stage could resume, or None if there is none."""
    resumed: stage_pb2.Checkpoint | None = None
    """The checkpoint from which this attempt resumed, or None if the attempt started from the beginning."""
    positions: dict[str, int] = field(default_factory=dict[str, int])
    """The position at which the newest attempt continues each output, by tensor name."""
    shown_steps: int = 0
    """The highest number of completed engine steps that was reported to the client for this stage."""
    restarts: int = 0
    dead_replicas: frozenset[Replica] = frozenset()
    """The replicas that died while they ran the stage. A restarted process counts as another replica."""
    alone: bool = False
    """Whether the attempt's replica must run no other request, because this request may cause processes to die."""
    avoid: frozenset[Replica] = frozenset()
    """The replicas on which the stage was lost. Such a replica is chosen again only if no other replica is ready."""
    superseded: list[SupersededAttempt] = field(default_factory=list[SupersededAttempt])
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    """The running tasks of the newest attempt."""
    busy: asyncio.Task[None] | None = None
    """The task that chooses a replica for the stage or rebinds the stage, or None if no such task runs."""
    arrangements: ExitStack = field(default_factory=ExitStack)
    """Callbacks that run when the replica is released, for example to end the replica's reservation."""

    @property
    def name(self) -> str:
        return self.step.stage.name

    @property
    def replica(self) -> Replica:
        """The replica of the newest attempt, or of the previous attempt until a replica is chosen."""
        return self.step.replica

    @property
    def at_work(self) -> bool:
        """Whether the step is being sent to its replica or is running there."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def store_checkpoint(self, checkpoint: stage_pb2.Checkpoint) -> None:
        """Replaces the stage's checkpoint. If the new checkpoint alone exceeds the budget, retains no checkpoint.

        Call this only if all consumers of the stage have received the rows before the checkpoint or will receive them.
        """
        if not self.budget.keep(self, checkpoint.ByteSize(), drop=self.discard_checkpoint):
            self.discard_checkpoint()
            return
        self.checkpoint = checkpoint
        self.checkpoint_rows = dict(checkpoint.rows)

    def discard_checkpoint(self) -> None:
        """Discards the checkpoint, if any. The stage can then only restart from the beginning."""
        self.budget.release(self)
        self.checkpoint = self.checkpoint_rows = None

    def restart(self, restart: Restart) -> None:
        """Replaces the current attempt with the next attempt, as decided in `restart`.

        The next attempt has no replica yet.
        """
        if self.at_work or self.phase is Phase.FINISHED:
            self.superseded.append(SupersededAttempt(self.replica, self.attempt))
        self.release_replica()
        for task in list(self.tasks):
            task.cancel()
        if not restart.resumes:
            self.discard_checkpoint()
        self.resumed = self.checkpoint
        self.attempt, self.phase, self.bound = restart.attempt, Phase.UNPLACED, {}
        self.first_rows = self.checkpoint_rows or {}
        self.positions = {}
        self.notes = self.busy = None
        self.restarts += 1

    def release_replica(self) -> None:
        """Removes the step from its replica's load, and runs the callbacks in `arrangements`."""
        self.step.release()
        self.arrangements.close()


States: TypeAlias = Mapping[str, AttemptState]


@dataclass(frozen=True)
class Restarts:
    """The consequences of a loss of stages: the stages to restart, and the checkpoints to discard."""

    restarted: Mapping[str, Restart]
    void: frozenset[str]
    """The stages whose checkpoints are useless, because a restarting consumer needs rows before the checkpoint."""
    unneeded: frozenset[str]
    """The lost stages that need not restart, because no other stage and no client needs their results."""


class ActionKind(Enum):
    """The operation that an action performs on its stage."""

    PLACE = "choose a replica"
    START = "send the newest attempt to its replica"
    """Possible only if every producer has a replica and every unfinished consumer already expects the attempt."""
    REBIND_INPUTS = "notify a running stage of the new producers on some edges"
    REBIND_OUTPUTS = "notify a stage of the new consumers on some edges"
    """Possible only if the consumers on these edges already expect the stage's data."""
    SEND_INPUT = "send the client's input to a running stage from its start"


@dataclass(frozen=True)
class Action:
    """An action of a request's recovery that is possible now, on one stage."""

    kind: ActionKind
    stage: str
    edges: tuple[str, ...] = ()
    """The edges to rebind, or over which the client's input is sent. Empty for the other kinds of actions."""


def carried_rows(edge: Edge, rows: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the entries of `rows` for tensors that the edge takes from the producer. `rows` maps tensor names to row
    counts.
    """
    return {name: count for name, count in rows.items() if not edge.tensors or name in edge.tensors}


def attempt_of(edge: Edge, states: States) -> int:
    """Returns the attempt number of an edge's flow: the higher of the producer's and the consumer's attempt number.

    Each attempt of a stage that receives the client's streamed input has a flow of its own.
    """
    attempt = states[edge.consumer].attempt
    return attempt if edge.is_input else max(states[edge.producer].attempt, attempt)


def is_checkpoint_useful(route: Route, states: States, stage: str, rows: Mapping[str, int]) -> bool:
    """Returns whether the stage could resume from a new checkpoint.

    `rows` is the number of rows before the checkpoint, by tensor name. Each consumer of these rows must have received
    them, or must be connected to the stage's current attempt, which will send them. In addition, the edges must allow
    the stage to omit these rows when it resumes.
    """
    for edge in route.outgoing[stage]:
        consumer = states[edge.consumer]
        receives = consumer.phase is Phase.FINISHED or (
            consumer.phase is Phase.RUNNING and consumer.bound.get(edge.name) == states[stage].bound.get(edge.name)
        )
        if _carries(edge, rows) and not (_is_resumable(edge, route) and receives):
            return False
    return True


def plan_restarts(
    route: Route, states: States, *, lost: Collection[str], fresh: Collection[str] = frozenset(), first_attempt: int = 1
) -> Restarts:
    """Returns the stages that must restart after a loss, and the consequences for the other stages.

    - `lost` contains the stages whose steps were lost.
    - `fresh` contains the stages that must restart from the beginning instead of from a checkpoint.
    - `first_attempt` is the lowest number of a new attempt. It exceeds the attempts of other orchestrators, which may
      recover the same request.
    """
    fallen = {stage for stage in lost if states[stage].phase is not Phase.FINISHED}
    unneeded = frozenset(stage for stage in fallen - set(fresh) if _is_unneeded(route, states, stage, fresh))
    restarting = _with_producers(route, states, (fallen | set(fresh)) - unneeded)
    restarted = {
        stage: Restart(
            attempt=max(first_attempt, _next_attempt(route, states, stage)),
            resumes=stage not in fresh and _can_resume(route, states, stage, restarting),
        )
        for stage in states
        if stage in restarting
    }
    void = frozenset(
        edge.producer
        for edge in route.edges
        if edge.consumer in restarting and _carries(edge, states[edge.producer].checkpoint_rows or {})
    )
    return Restarts(restarted, void, unneeded)


def find_superfluous(route: Route, states: States) -> list[str]:
    """Returns the stages that wait for a replica although no other stage and no client needs their results any more.

    Such a stage has lost its replica, and its consumers have finished without it.
    """
    waiting = [stage for stage, state in states.items() if state.phase is Phase.UNPLACED]
    return [stage for stage in waiting if _is_unneeded(route, states, stage, ())]


def find_overtaken(route: Route, states: States, stage: str, bound: Mapping[str, int]) -> list[Edge]:
    """Returns the edges of a stage whose other end another orchestrator has replaced by a later attempt.

    `bound` is the attempt in which each flow of the stage's newest attempt is bound, by edge name.
    """
    edges = (*route.incoming[stage], *route.outgoing[stage])
    return [edge for edge in edges if bound.get(edge.name, 0) > attempt_of(edge, states)]


def next_actions(route: Route, states: States) -> list[Action]:
    """Returns all actions that are possible now.

    Further actions may become possible after these actions have completed.
    """
    return [action for stage in states for action in _actions_of(route, states, stage)]


def is_open(edge: Edge, states: States) -> bool:
    """Returns whether the edge's consumer can still receive data, because the consumer has not finished."""
    return states[edge.consumer].phase is not Phase.FINISHED


def _actions_of(route: Route, states: States, stage: str) -> list[Action]:
    state = states[stage]
    match state.phase:
        case Phase.UNPLACED:
            return [Action(ActionKind.PLACE, stage)]
        case Phase.PLACED:
            is_placed = all(states[edge.producer].phase is not Phase.UNPLACED for edge in route.incoming[stage])
            is_expected = all(_is_expected(edge, states) for edge in route.outgoing[stage] if is_open(edge, states))
            return [Action(ActionKind.START, stage)] if is_placed and is_expected else []
        case Phase.STARTING:
            return []
        case Phase.RUNNING | Phase.FINISHED:
            running = state.phase is Phase.RUNNING
            inputs = _stale(route.inputs[stage], states, stage) if running else []
            incoming = _stale(route.incoming[stage], states, stage) if running else []
            outgoing = _stale(route.outgoing[stage], states, stage)
            placed = [edge for edge in incoming if states[edge.producer].phase is not Phase.UNPLACED]
            expected = [edge for edge in outgoing if _is_expected(edge, states)]
            possible = (
                (ActionKind.SEND_INPUT, inputs),
                (ActionKind.REBIND_INPUTS, placed),
                (ActionKind.REBIND_OUTPUTS, expected),
            )
            return [Action(kind, stage, tuple(edge.name for edge in edges)) for kind, edges in possible if edges]


def _carries(edge: Edge, rows: Mapping[str, int]) -> bool:
    return any(carried_rows(edge, rows).values())


def _stale(edges: Iterable[Edge], states: States, end: str) -> list[Edge]:
    return [edge for edge in edges if _is_stale(edge, states, end)]


def _is_stale(edge: Edge, states: States, end: str) -> bool:
    return states[end].bound.get(edge.name) != attempt_of(edge, states)


def _is_expected(edge: Edge, states: States) -> bool:
    """Returns whether the edge's consumer is running and was notified of the flow's current attempt."""
    return states[edge.consumer].phase is Phase.RUNNING and not _is_stale(edge, states, edge.consumer)


def _next_attempt(route: Route, states: States, stage: str) -> int:
    edges = (*route.incoming[stage], *route.outgoing[stage])
    return 1 + max([states[stage].attempt, *(attempt_of(edge, states) for edge in edges)])


def _is_unneeded(route: Route, states: States, stage: str, restarting: Collection[str]) -> bool:
    consumers = [edge.consumer for edge in route.outgoing[stage]]
    finished = all(states[name].phase is Phase.FINISHED and name not in restarting for name in consumers)
    has_output = any(output.stage == stage for output in route.outputs.values())
    return bool(consumers) and finished and not has_output


def _with_producers(route: Route, states: States, restarting: Collection[str]) -> set[str]:
    """Returns `restarting` plus all direct and indirect producers that must restart too.

    A producer that resumed from a checkpoint has omitted the rows before the checkpoint. If a consumer of these rows
    restarts, the producer must restart too.
    """
    found, pending = set(restarting), list(restarting)
    while pending:
        for edge in route.incoming[pending.pop()]:
            if edge.producer not in found and _carries(edge, states[edge.producer].first_rows):
                found.add(edge.producer)
                pending.append(edge.producer)
    return found


def _can_resume(route: Route, states: States, stage: str, restarting: Collection[str]) -> bool:
    rows = states[stage].checkpoint_rows
    if rows is None:
        return False
    received = (Phase.RUNNING, Phase.FINISHED)
    return all(
        _is_resumable(edge, route) and edge.consumer not in restarting and states[edge.consumer].phase in received
        for edge in route.outgoing[stage]
        if _carries(edge, rows)
    )


def _is_resumable(edge: Edge, route: Route) -> bool:
    """Returns whether a producer that resumes from a checkpoint may omit rows on this edge.

    This requires that no chunk repeats rows of an earlier chunk, and that the edge transfers every row that the
    producer emits, not the results of a transform.
    """
    if edge.transforms_at_producer:
        return False
    if edge.tokens == "last" and any(other.tokens != "last" for other in route.outgoing[edge.producer]):
        return False
    if isinstance(edge.policy, StepPolicy):
        return True
    return not isinstance(edge.policy, WholePolicy) and not edge.policy.left_context_frames
