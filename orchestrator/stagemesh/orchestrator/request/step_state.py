"""The state of one stage of a running request: its replica, its reports, and the facts that recovery needs."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from stagemesh.common.output_position import Position
from stagemesh.connectors.edge import StepPolicy, WholePolicy
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.planner import Plan, PlannedStep
from stagemesh.orchestrator.planning.state_budget import StateBudget
from stagemesh.orchestrator.request.recovery import AttemptState, Flow, Graph, Phase, Restart
from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.orchestrator.spec import Edge, Route
from stagemesh.v1 import stage_pb2


@dataclass(frozen=True)
class ReceivedCheckpoint:
    """A state from which a stage can resume, and the position of the stage's outputs when the state arrived."""

    message: stage_pb2.Checkpoint
    position: Position


@dataclass(frozen=True)
class SupersededAttempt:
    """An attempt that a newer attempt has replaced. Its replica may still be working on it."""

    replica: Replica
    attempt: int


@dataclass(eq=False, kw_only=True)
class StepState(AttemptState):
    """The full state of a stage: its newest attempt's replica and outputs, and the facts that outlive an attempt."""

    step: PlannedStep
    budget: StateBudget
    """The limit for the checkpoint states that all steps of the orchestrator retain."""
    notes: StepNotes | None = None
    checkpoint: ReceivedCheckpoint | None = None
    """The newest useful checkpoint, or None if there is none."""
    resumed: ReceivedCheckpoint | None = None
    """The checkpoint from which this attempt resumed, or None if it started from the beginning."""
    position: Position = field(default_factory=Position)
    """The position of this attempt in the pipeline's outputs that the stage produces."""
    next_seqs: dict[str, int] = field(default_factory=dict[str, int])
    """The number that the attempt's next fragment must have, by tensor."""
    shown_steps: int = 0
    """The highest number of engine steps that was reported to the client."""
    restarts: int = 0
    dead_replicas: frozenset[Replica] = frozenset()
    """The replicas that died while they ran the stage. A restarted process is a new Replica."""
    alone: bool = False
    """Whether no other request may run on the stage's replica."""
    avoid: frozenset[Replica] = frozenset()
    """The replicas on which the stage was lost. They are chosen again only if there is no other."""
    superseded: list[SupersededAttempt] = field(default_factory=list[SupersededAttempt])
    arrangements: ExitStack = field(default_factory=ExitStack)
    """Callbacks that end the reservation of the replica and remove the callback for its end."""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.step.stage.name

    @property
    def replica(self) -> Replica:
        """The replica of the newest attempt, or the previous replica if the attempt has none yet."""
        return self.step.replica

    @property
    def at_work(self) -> bool:
        """Whether the step was sent or is about to be sent to its replica, and has not finished."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def store_checkpoint(self, checkpoint: stage_pb2.Checkpoint) -> None:
        """Replaces the checkpoint. If the budget does not allow it, only discards the previous checkpoint.

        The stage's consumers must receive all rows before the checkpoint.
        """
        if not self.budget.keep(self, checkpoint.ByteSize(), drop=self.discard_checkpoint):
            self.discard_checkpoint()
            return
        self.checkpoint = ReceivedCheckpoint(checkpoint, self.position.copy())
        self.checkpoint_rows = dict(checkpoint.rows)

    def discard_checkpoint(self) -> None:
        """Drops the checkpoint, which can no longer be used."""
        self.budget.release(self)
        self.checkpoint = self.checkpoint_rows = None

    def restart(self, restart: Restart) -> None:
        """Ends the current attempt, and starts the next attempt, which waits for a replica."""
        if self.at_work or self.phase is Phase.FINISHED:
            self.superseded.append(SupersededAttempt(self.replica, self.attempt))
        self.release_replica()
        if not restart.resumes:
            self.discard_checkpoint()
        self.resumed = self.checkpoint
        self.attempt, self.phase, self.bound = restart.attempt, Phase.UNPLACED, {}
        self.first_rows = self.checkpoint_rows or {}
        self.position = self.resumed.position.copy() if self.resumed is not None else Position()
        self.next_seqs = {}
        self.notes = None
        self.restarts += 1

    def release_replica(self) -> None:
        """Removes the step from its replica's load. Ends the reservation of the replica, and the wait for its end."""
        self.step.release()
        self.arrangements.close()


def graph_of(plan: Plan) -> Graph:
    """Returns the stages and flows of a planned request."""
    return Graph(
        tuple(stage.name for stage in plan.route.stages),
        tuple(
            Flow(edge.name, edge.producer, edge.consumer, frozenset(edge.tensors), _is_resumable(edge, plan.route))
            for edge in plan.route.edges
        ),
        output_stages=frozenset(output.stage for output in plan.route.outputs.values()),
    )


def _is_resumable(edge: Edge, route: Route) -> bool:
    """Returns whether the first rows of a flow can be omitted.

    They can if no row is sent together with earlier rows and if the edge itself omits no rows.
    """
    if edge.tokens == "last" and any(other.tokens != "last" for other in route.outgoing[edge.producer]):
        return False
    if isinstance(edge.policy, StepPolicy):
        return True
    return not isinstance(edge.policy, WholePolicy) and not edge.policy.left_context_frames
