"""What the orchestrator knows about a replica."""

import time
from collections.abc import Callable, Collection
from enum import Enum
from typing import Protocol

from stagemesh.common.errors import StagemeshError
from stagemesh.common.versions import WIRE_VERSION
from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.fleet.load_estimate import LoadEstimate, StepCost
from stagemesh.orchestrator.fleet.stage_client import StageClient
from stagemesh.orchestrator.spec import Pipeline
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
        return _BY_NUMBER.get(value, cls.FAILED)


_BY_NUMBER = {state.wire: state for state in ReplicaState}


class Replica:
    """One replica of a stage, from a start of its process to its end: its client, its state as last seen, its load.

    A process that starts again at the same address is another replica. `on_gone` tells when this one has ended.
    """

    def __init__(
        self,
        stage: str,
        address: ReplicaAddress,
        client: StageClient,
        *,
        on_change: Callable[[], None],
        cost: StepCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage = stage
        self.name = address.name
        self.endpoint = address.endpoint
        self.client = client
        self.load = LoadEstimate(cost or StepCost(), clock=clock)
        self.incarnation = self.generation = self.host = self.zone = ""
        """As it first says of itself; empty until then."""
        self._described = False
        self.last_report: stage_pb2.WatchLoadResponse | None = None
        """The replica's newest load report, or None before the first."""
        self._reported_at_s = 0.0
        self._clock = clock
        self._on_change = on_change
        self._state = ReplicaState.UNREACHABLE
        self._detail = "not heard of yet"
        self._leaving = self._reserved = ""
        self.died = False
        """Whether its process has ended, for all that we know; one that has `gone` may merely be cut off."""
        self._gone: StagemeshError | None = None
        self._mourners: dict[object, Callable[[StagemeshError], None]] = {}

    @property
    def state(self) -> ReplicaState:
        """As last seen; one that is leaving, or reserved, is DRAINING whatever it says."""
        taken = self._leaving or self._reserved
        return ReplicaState.DRAINING if taken and self._state is ReplicaState.READY else self._state

    @property
    def detail(self) -> str:
        """For people: what it loads, or why it fails."""
        return self._leaving or self._reserved or self._detail

    @property
    def met(self) -> bool:
        """Whether it has ever said what it is."""
        return self._described

    @property
    def running(self) -> int:
        """How many of our requests it works on."""
        return self.load.running

    @property
    def report_age_s(self) -> float:
        """Seconds since `last_report` was received."""
        return self._clock() - self._reported_at_s

    def record_load(self, report: stage_pb2.WatchLoadResponse) -> None:
        """Records a load report, for the planner and for operators."""
        self.last_report, self._reported_at_s = report, self._clock()
        self.load.report(report.work_s, steps=report.running + report.queued)

    @property
    def gone(self) -> StagemeshError | None:
        """Why it has ended; None while it may live."""
        return self._gone

    def on_gone(self, callback: Callable[[StagemeshError], None]) -> Callable[[], None]:
        """Has `callback` told the cause once the replica has ended, or now where it has; returns what takes it back."""
        if self._gone is not None:
            callback(self._gone)
            return lambda: None
        key = object()
        self._mourners[key] = callback

        def take_back() -> None:
            self._mourners.pop(key, None)

        return take_back

    def end(self, cause: StagemeshError, *, died: bool = True) -> None:
        """It has ended, and its requests there with it; or it is given up, and may live. Ending twice is harmless."""
        if self._gone is not None:
            return
        self._gone, self.died = cause, died
        mourners, self._mourners = self._mourners, {}
        for callback in mourners.values():
            callback(cause)
        self.load.idle.fire()

    async def wait_unused(self) -> None:
        """Returns once none of our requests runs on it: they are done, or it has ended."""
        while self.running and self._gone is None:
            await self.load.idle.wait()

    def leave(self, why: str) -> None:
        """It takes no more requests; those that it has go on."""
        self._leaving = why
        self._on_change()

    def reserve(self, why: str) -> Callable[[], None]:
        """It takes no more requests but one, which whoever calls puts there; returns what ends that."""
        self._reserved = why
        self._on_change()

        def end() -> None:
            self._reserved = ""
            self._on_change()

        return end

    def observe(self, state: ReplicaState, detail: str) -> None:
        """Takes note of a state; tells the owner when it is another."""
        changed = state is not self._state
        self._state, self._detail = state, detail
        if changed:
            self._on_change()

    def observe_description(
        self, said: stage_pb2.DescribeResponse, pipeline: Pipeline, *, generations: Collection[str] = ()
    ) -> None:
        """Takes note of what the replica says; one that belongs elsewhere is refused."""
        if not self._described:
            self._described = True
            self.incarnation, self.generation = said.incarnation, said.generation
            self.host, self.zone = said.host, said.zone
        refusal = find_refusal(said, stage=self.stage, pipeline=pipeline, generations=generations)
        if refusal:
            self.observe(ReplicaState.FAILED, f"refused: {refusal}")
        else:
            self.observe(ReplicaState.from_wire(said.state), said.detail)


class Belonging(Protocol):
    """What a replica says of where it belongs: DescribeResponse and ReplicaIdentity."""

    wire_version: int
    pipeline: str
    generation: str
    stage: str


def find_refusal(said: Belonging, *, stage: str, pipeline: Pipeline, generations: Collection[str] = ()) -> str:
    """Why a replica is not one of this stage, for people; empty where it is.

    `generations` are those that are taken in beside the pipeline's own.
    """
    generation = said.generation if said.generation in generations else pipeline.generation
    facts = {
        "wire version": (said.wire_version, WIRE_VERSION),
        "pipeline": (said.pipeline, pipeline.name),
        "generation": (said.generation, generation),
        "stage": (said.stage, stage),
    }
    return "; ".join(f"its {what} is {has}, expected {want}" for what, (has, want) in facts.items() if has != want)
