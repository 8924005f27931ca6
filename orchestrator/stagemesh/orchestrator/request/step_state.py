"""The state of one stage of a running request: its replica, its progress, and the facts on which recovery depends."""

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
    """A checkpoint of a stage, and the position that the stage's outputs had reached when the checkpoint arrived."""

    message: stage_pb2.Checkpoint
    position: Position


@dataclass(frozen=True)
class SupersededAttempt:
    """An attempt that a newer attempt has replaced. Its replica may still be working on it."""

    replica: Replica
    attempt: int


@dataclass(eq=False, kw_only=True)
class StepState(AttemptState):
    """The full state of a stage of a request: its newest attempt, and the facts that remain valid over all attempts."""

    step: PlannedStep
    budget: StateBudget
    """The limit on the total bytes of the checkpoints that the orchestrator retains for all requests."""
    notes: StepNotes | None = None
    checkpoint: ReceivedCheckpoint | None = None
    """The newest checkpoint from which the stage could resume, or None if there is none."""
    resumed: ReceivedCheckpoint | None = None
    """The checkpoint from which this attempt resumed, or None if the attempt started from the beginning."""
    position: Position = field(default_factory=Position)
    """The position that this attempt has reached in each of its outputs, for example in tokens or audio samples."""
    next_seqs: dict[str, int] = field(default_factory=dict[str, int])
    """The expected number of the attempt's next output fragment, by tensor name."""
    shown_steps: int = 0
    """The highest number of completed engine steps that the client has received for this stage."""
    restarts: int = 0
    dead_replicas: frozenset[Replica] = frozenset()
    """The replicas that died while they ran the stage. A restarted process counts as another replica."""
    alone: bool = False
    """Whether the attempt's replica must run no other request, because the request may be what kills replicas."""
    avoid: frozenset[Replica] = frozenset()
    """The replicas on which the stage was lost. They are chosen again only if no other replica is ready."""
    superseded: list[SupersededAttempt] = field(default_factory=list[SupersededAttempt])
    arrangements: ExitStack = field(default_factory=ExitStack)
    """Callbacks for the release of the replica: they end its reservation and stop observing its end."""

    @property
    def name(self) -> str:
        return self.step.stage.name

    @property
    def replica(self) -> Replica:
        """The replica of the newest attempt. Until one is chosen, the replica of the previous attempt."""
        return self.step.replica

    @property
    def at_work(self) -> bool:
        """Whether the step is being sent to its replica or is running there."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def store_checkpoint(self, checkpoint: stage_pb2.Checkpoint) -> None:
        """Replaces the checkpoint. If the new checkpoint exceeds the budget, only discards the previous checkpoint.

        Call this only if the stage's consumers receive all rows before the checkpoint.
        """
        if not self.budget.keep(self, checkpoint.ByteSize(), drop=self.discard_checkpoint):
            self.discard_checkpoint()
            return
        self.checkpoint = ReceivedCheckpoint(checkpoint, self.position.copy())
        self.checkpoint_rows = dict(checkpoint.rows)

    def discard_checkpoint(self) -> None:
        """Discards the checkpoint, if any. The stage can then only restart from the beginning."""
        self.budget.release(self)
        self.checkpoint = self.checkpoint_rows = None

    def restart(self, restart: Restart) -> None:
        """Supersedes the current attempt, and creates the next attempt, which waits for a replica."""
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
        """Removes the step from its replica's load, ends the replica's reservation, and stops observing its end."""
        self.step.release()
        self.arrangements.close()


def graph_of(plan: Plan) -> Graph:
    """Returns the graph of a planned request's stages and flows."""
    return Graph(
        tuple(stage.name for stage in plan.route.stages),
        tuple(
            Flow(edge.name, edge.producer, edge.consumer, frozenset(edge.tensors), _is_resumable(edge, plan.route))
            for edge in plan.route.edges
        ),
        output_stages=frozenset(output.stage for output in plan.route.outputs.values()),
    )


def _is_resumable(edge: Edge, route: Route) -> bool:
    """Returns whether the producer of an edge may omit the first rows of a flow.

    This requires that no chunk contains rows of an earlier chunk, and that the edge transfers every row.
    """
    if edge.tokens == "last" and any(other.tokens != "last" for other in route.outgoing[edge.producer]):
        return False
    if isinstance(edge.policy, StepPolicy):
        return True
    return not isinstance(edge.policy, WholePolicy) and not edge.policy.left_context_frames
