"""One stage's part in a request that runs: where it is, what was heard of it, and what is kept for when it is lost."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stagemesh.connectors.edge import StepPolicy, WholePolicy
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.planner import Plan, PlannedStep
from stagemesh.orchestrator.request.output_position import after, length_of
from stagemesh.orchestrator.request.recovery import Flow, Graph, Phase, Restart, Share
from stagemesh.orchestrator.request.state_budget import StateBudget
from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.orchestrator.spec import Edge, Route
from stagemesh.v1 import request_pb2, stage_pb2


@dataclass(frozen=True)
class HeardCheckpoint:
    """A state to resume from, and how far the stage's outputs were when it came."""

    message: stage_pb2.Checkpoint
    positions: Mapping[str, int]


@dataclass(frozen=True)
class SupersededAttempt:
    """An attempt that another one has replaced, and which may not know it yet."""

    replica: Replica
    attempt: int


def _nothing() -> None:
    """Takes nothing back."""


@dataclass(eq=False, kw_only=True)
class StepState(Share):
    """See Share; and what belongs to its newest attempt."""

    step: PlannedStep
    budget: StateBudget
    """Limits the states that all steps of the orchestrator keep."""
    notes: StepNotes | None = None
    checkpoint: HeardCheckpoint | None = None
    """The newest that is of use."""
    resumed: HeardCheckpoint | None = None
    """What this attempt began from; None for the start."""
    positions: Counter[str] = field(default_factory=Counter[str])
    """By output, how far this attempt is."""
    next_seqs: dict[str, int] = field(default_factory=dict[str, int])
    """By output, the number that this attempt's next piece must have."""
    shown_steps: int = 0
    """How far the client knows the stage to be."""
    restarts: int = 0
    died_with: frozenset[Replica] = frozenset()
    """Processes that died while they ran it: a replica is one life. One that is dying may be chosen once more."""
    alone: bool = False
    """Whether nothing else is to be on its replica."""
    avoid: frozenset[Replica] = frozenset()
    """Where it was lost."""
    former: list[SupersededAttempt] = field(default_factory=list[SupersededAttempt])
    leave: Callable[[], None] = _nothing
    """Ends what was arranged with its replica."""

    @property
    def name(self) -> str:
        """The stage's."""
        return self.step.stage.name

    @property
    def replica(self) -> Replica:
        """Where it is, or was last."""
        return self.step.replica

    @property
    def at_work(self) -> bool:
        """Whether its replica knows of it, or is about to, and has not said that it is done."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def keep(self, checkpoint: stage_pb2.Checkpoint) -> None:
        """The stage made a checkpoint, of which its consumers have all that was before."""
        if not self.budget.keep(self, checkpoint.ByteSize(), drop=self.forget_checkpoint):
            self.forget_checkpoint()
            return
        self.checkpoint = HeardCheckpoint(checkpoint, dict(self.positions))
        self.kept_rows = dict(checkpoint.rows)

    def forget_checkpoint(self) -> None:
        """It is of no use any more."""
        self.budget.release(self)
        self.checkpoint = self.kept_rows = None

    def begin_anew(self, restart: Restart) -> None:
        """Its attempt is over; the next one waits for a replica."""
        if self.at_work or self.phase is Phase.FINISHED:
            self.former.append(SupersededAttempt(self.replica, self.attempt))
        self.leave_replica()
        if not restart.resumes:
            self.forget_checkpoint()
        self.resumed = self.checkpoint
        self.attempt, self.phase, self.told = restart.attempt, Phase.UNPLACED, {}
        self.first_rows = self.kept_rows or {}
        self.positions = Counter(self.resumed.positions if self.resumed is not None else {})
        self.next_seqs = {}
        self.notes = None
        self.restarts += 1

    def leave_replica(self) -> None:
        """Its replica has less to do, and its end is no news any more."""
        self.step.release()
        leave, self.leave = self.leave, _nothing
        leave()


class DeliveredOutputs:
    """How much of each output the client has been given, and so what is new to it."""

    def __init__(self) -> None:
        self._positions = Counter[str]()

    def rest(self, name: str, output: request_pb2.Output, *, part: StepState) -> request_pb2.Output | None:
        """What a piece of output `name` adds to what was passed on before, which counts as passed on then."""
        begin = part.positions[name]
        end = part.positions[name] = begin + length_of(output)
        had = self._positions[name]
        if begin < had:
            if end <= had:
                return None
            # What is left goes on at `had`.
            rest = after(output, had - begin)
            self._positions[name] = end
            return rest
        self._positions[name] = end
        return output


def graph_of(plan: Plan) -> Graph:
    """The request's stages and flows."""
    return Graph(
        tuple(stage.name for stage in plan.route.stages),
        tuple(
            Flow(edge.name, edge.producer, edge.consumer, frozenset(edge.tensors), _is_resumable(edge, plan.route))
            for edge in plan.route.edges
        ),
        heard=frozenset(output.stage for output in plan.route.outputs.values()),
    )


def _is_resumable(edge: Edge, route: Route) -> bool:
    """Whether rows can be left out at a flow's front: none is sent with others before it, or only some of them."""
    if edge.tokens == "last" and any(other.tokens != "last" for other in route.outgoing[edge.producer]):
        return False
    if isinstance(edge.policy, StepPolicy):
        return True
    return not isinstance(edge.policy, WholePolicy) and not edge.policy.left_context_frames
