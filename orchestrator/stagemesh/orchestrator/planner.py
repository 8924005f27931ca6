"""Picks a replica for each stage of a request and says what each is to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagemesh.connectors.errors import UnavailableError
from stagemesh.connectors.registry import number_of
from stagemesh.orchestrator.replica import Replica, ReplicaState
from stagemesh.orchestrator.spec import Edge, Pipeline, Route, Stage
from stagemesh.orchestrator.wire import policy_to_wire
from stagemesh.v1 import stage_pb2

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class PlannedStep:
    """One stage's part in a request."""

    stage: Stage
    replica: Replica
    inputs: tuple[stage_pb2.InputBinding, ...]
    outputs: tuple[stage_pb2.OutputBinding, ...]
    output_names: Mapping[str, str]
    """The pipeline's outputs that the stage makes, by the tensor that it calls them."""
    consumers: tuple[str, ...]
    """The stages that it feeds: they are started before it."""
    absent: tuple[str, ...] = ()
    """The tensors that it accepts and that no edge brings it."""

    @property
    def takes_input(self) -> bool:
        """Whether the client's input goes here."""
        return not self.inputs


@dataclass(frozen=True)
class Plan:
    """What runs where for one request, producers before consumers. It counts as load until it is released."""

    steps: tuple[PlannedStep, ...]

    @property
    def replicas(self) -> Mapping[str, str]:
        """The chosen replica's name for each stage."""
        return {step.stage.name: step.replica.name for step in self.steps}

    def release(self) -> None:
        """Takes the request off its replicas' load. Once."""
        for step in self.steps:
            step.replica.running -= 1


class Planner:
    """Plans requests over the replicas as they are now."""

    def __init__(self, pipeline: Pipeline, replicas: Mapping[str, Sequence[Replica]]) -> None:
        self._pipeline = pipeline
        self._replicas = replicas

    def plan(self, route: Route) -> Plan:
        """The stages of a route, each on its least busy ready replica.

        Raises UnavailableError (STAGE_NOT_READY) naming the stage and its replicas' states.
        """
        chosen = {stage.name: self._pick(stage.name) for stage in route.stages}
        for replica in chosen.values():
            replica.running += 1
        return Plan(tuple(_step(stage, route, chosen) for stage in route.stages))

    def _pick(self, stage: str) -> Replica:
        replicas = self._replicas.get(stage, ())
        ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
        if not ready:
            states = ", ".join(_describe(replica) for replica in replicas) or "it has no replicas"
            raise UnavailableError(
                f"no replica of stage {stage!r} is ready: {states}; try again when `stagemesh stages` shows it ready",
                reason="STAGE_NOT_READY",
                metadata={"stage": stage},
                retry_after_s=_RETRY_AFTER_S,
            )
        return min(ready, key=lambda replica: replica.running)


def _step(stage: Stage, route: Route, chosen: Mapping[str, Replica]) -> PlannedStep:
    incoming, outgoing = route.incoming[stage.name], route.outgoing[stage.name]
    return PlannedStep(
        stage=stage,
        replica=chosen[stage.name],
        inputs=tuple(_input_binding(edge, chosen[edge.producer]) for edge in incoming),
        outputs=tuple(_output_binding(edge, chosen[edge.consumer]) for edge in outgoing),
        output_names={output.tensor: output.name for output in route.outputs.values() if output.stage == stage.name},
        consumers=tuple(dict.fromkeys(edge.consumer for edge in outgoing)),
        absent=route.absent(stage),
    )


def _describe(replica: Replica) -> str:
    detail = f" ({replica.detail})" if replica.detail else ""
    return f"{replica.name} {replica.state.value.lower()}{detail}"


def _input_binding(edge: Edge, producer: Replica) -> stage_pb2.InputBinding:
    return stage_pb2.InputBinding(edge=edge.name, producer=producer.name, transform=edge.transform, apart=edge.apart)


def _output_binding(edge: Edge, consumer: Replica) -> stage_pb2.OutputBinding:
    return stage_pb2.OutputBinding(
        edge=edge.name,
        consumer=consumer.name,
        endpoint=consumer.endpoint,
        connector=number_of(edge.connector),
        policy=policy_to_wire(edge.policy),
        tensors=edge.tensors,
        tokens=stage_pb2.TokenSelection.Value(f"TOKEN_SELECTION_{edge.tokens.upper()}"),
    )
