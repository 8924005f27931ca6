"""What the orchestrator knows about a replica."""

from collections.abc import Callable
from enum import Enum

from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.spec import WIRE_VERSION, Pipeline
from stagemesh.orchestrator.stages import StageClient
from stagemesh.v1 import stage_pb2


class ReplicaState(Enum):
    """Where a replica stands; the value is the wire's name without its prefix."""

    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    ASLEEP = "ASLEEP"
    UNREACHABLE = "UNREACHABLE"

    @property
    def wire(self) -> stage_pb2.ReplicaState.ValueType:
        """The wire's value."""
        return stage_pb2.ReplicaState.Value(f"REPLICA_STATE_{self.value}")

    @classmethod
    def from_wire(cls, value: stage_pb2.ReplicaState.ValueType) -> "ReplicaState":
        """The state that a replica reports; one that is not known counts as FAILED."""
        by_number = {state.wire: state for state in cls}
        return by_number.get(value, cls.FAILED)


class Replica:
    """One replica of a stage: its client, its state as last seen, and how many of our requests it works on."""

    def __init__(
        self, stage: str, address: ReplicaAddress, client: StageClient, *, on_change: Callable[[], None]
    ) -> None:
        self.stage = stage
        self.name = address.name
        self.endpoint = address.endpoint
        self.client = client
        self.running = 0
        self._on_change = on_change
        self._state = ReplicaState.UNREACHABLE
        self._detail = "not heard of yet"

    @property
    def state(self) -> ReplicaState:
        """As last seen."""
        return self._state

    @property
    def detail(self) -> str:
        """For people: what it loads, or why it fails."""
        return self._detail

    def observe(self, state: ReplicaState, detail: str) -> None:
        """Takes note of a state; tells the owner when it is another."""
        changed = state is not self._state
        self._state, self._detail = state, detail
        if changed:
            self._on_change()

    def observe_description(self, said: stage_pb2.DescribeResponse, pipeline: Pipeline) -> None:
        """Takes note of what the replica says; one that belongs elsewhere is refused."""
        refusal = _refusal(said, stage=self.stage, pipeline=pipeline)
        if refusal:
            self.observe(ReplicaState.FAILED, f"refused: {refusal}")
        else:
            self.observe(ReplicaState.from_wire(said.state), said.detail)


def _refusal(said: stage_pb2.DescribeResponse, *, stage: str, pipeline: Pipeline) -> str:
    facts = {
        "wire version": (said.wire_version, WIRE_VERSION),
        "pipeline": (said.pipeline, pipeline.name),
        "generation": (said.generation, pipeline.generation),
        "stage": (said.stage, stage),
    }
    return "; ".join(f"its {what} is {has}, expected {want}" for what, (has, want) in facts.items() if has != want)
