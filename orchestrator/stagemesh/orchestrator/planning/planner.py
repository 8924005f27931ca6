"""Picks a replica for each stage of a request and says what each is to do."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stagemesh.common.connector_descriptors import number_of
from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas, ReplicaRegistry
from stagemesh.orchestrator.planning.policy_conversion import policy_to_wire
from stagemesh.orchestrator.planning.replica_choice import Choice, LeastWork
from stagemesh.orchestrator.spec import Edge, Pipeline, Route, Stage
from stagemesh.v1 import stage_pb2

_RETRY_AFTER_S = 1.0
_DESCRIBED = 8
"""A message names no more replicas than so many."""


class NotReadyYetError(UnavailableError):
    """A stage has no ready replica, and one that may be ready soon."""


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
    release: Callable[[], None]
    """Takes the step off its replica's load; again and again is harmless."""
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
    route: Route
    generation: str = ""
    """The one that all of its replicas are of."""

    @property
    def replicas(self) -> Mapping[str, str]:
        """The chosen replica's name for each stage."""
        return {step.stage.name: step.replica.name for step in self.steps}

    def moved(self, stage: str, replica: Replica) -> "Plan":
        """The plan with one stage elsewhere, which counts as load there; its neighbours' bindings name that replica."""
        chosen = {step.stage.name: step.replica for step in self.steps} | {stage: replica}
        steps = tuple(
            _step(step.stage, self.route, chosen)
            if step.stage.name == stage
            else _step(step.stage, self.route, chosen, release=step.release)
            for step in self.steps
        )
        return replace(self, steps=steps)

    def release(self) -> None:
        """Takes the request off its replicas' load, where its steps have not been already."""
        for step in self.steps:
            step.release()


class Planner:
    """Plans requests over the replicas as they are now; a plan takes the same time however many there are."""

    def __init__(
        self,
        pipeline: Pipeline,
        book: ReplicaRegistry,
        *,
        choice: Choice | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._book = book
        self._rng = rng or random.Random()  # noqa: S311
        self._choice = choice or LeastWork(self._rng)

    def plan(self, route: Route) -> Plan:
        """The stages of a route, each on a ready replica with little to do, all of one generation.

        Raises UnavailableError (STAGE_NOT_READY) naming the stage and its replicas' states; NotReadyYetError where one
        of those is expected.
        """
        generation, ready = self._generation([stage.name for stage in route.stages])
        chosen: dict[str, Replica] = {}
        for stage in route.stages:
            replica = self._choice.choose(ready[stage.name], near=self._neighbours(stage.name, chosen))
            assert replica is not None, "a generation that serves a stage has a replica there"
            chosen[stage.name] = replica
        return Plan(tuple(_step(stage, route, chosen) for stage in route.stages), route, generation)

    def choose_again(self, stage: str, plan: Plan, *, avoid: Collection[Replica]) -> Replica:
        """Another replica for one stage of a plan, of the plan's generation and near to its neighbours there.

        Raises UnavailableError (STAGE_NOT_READY) where there is none but those to avoid.
        """
        ready = self._book.ready([stage]).get(plan.generation, {}).get(stage)
        chosen = {step.stage.name: step.replica for step in plan.steps if step.stage.name != stage}
        replica = ready and self._choice.choose(ready, near=self._neighbours(stage, chosen), avoid=avoid)
        if not replica:
            raise self._not_ready(stage)
        return replica

    def _generation(self, stages: Sequence[str]) -> tuple[str, Mapping[str, ReadyReplicas]]:
        """One in which every stage is ready; of several, each as often as its scarcest stage allows."""
        ready = self._book.ready(stages)
        if not ready:
            missing = next((stage for stage in stages if not self._book.has_ready(stage)), None)
            raise self._not_ready(missing) if missing else self._scattered()
        if len(ready) == 1:
            return next(iter(ready.items()))
        weights = [min(len(by_stage[stage].all) for stage in stages) for by_stage in ready.values()]
        return self._rng.choices(list(ready.items()), weights)[0]

    def _neighbours(self, stage: str, chosen: Mapping[str, Replica]) -> list[Replica]:
        edges = (*self._pipeline.incoming(stage), *self._pipeline.outgoing(stage))
        names = dict.fromkeys(edge.producer if edge.consumer == stage else edge.consumer for edge in edges)
        return [chosen[name] for name in names if name in chosen]

    def _not_ready(self, stage: str) -> UnavailableError:
        replicas = self._book.of(stage)
        states = ", ".join(_describe(replica) for replica in replicas[:_DESCRIBED]) or "it has no replicas"
        more = f" and {len(replicas) - _DESCRIBED} more" if len(replicas) > _DESCRIBED else ""
        cause = NotReadyYetError if any(map(_is_expected, replicas)) else UnavailableError
        return cause(
            f"no replica of stage {stage!r} is ready: {states}{more}; try again when `stagemesh stages` shows it ready",
            reason="STAGE_NOT_READY",
            metadata={"stage": stage},
            retry_after_s=_RETRY_AFTER_S,
        )

    def _scattered(self) -> UnavailableError:
        return UnavailableError(
            "every stage has a ready replica, but of no one generation: an upgrade is half done; try again when it "
            "has got on",
            reason="STAGE_NOT_READY",
            retry_after_s=_RETRY_AFTER_S,
        )


def _step(
    stage: Stage, route: Route, chosen: Mapping[str, Replica], *, release: Callable[[], None] | None = None
) -> PlannedStep:
    incoming, outgoing = route.incoming[stage.name], route.outgoing[stage.name]
    return PlannedStep(
        stage=stage,
        replica=chosen[stage.name],
        inputs=tuple(_input_binding(edge, chosen[edge.producer]) for edge in incoming),
        outputs=tuple(_output_binding(edge, chosen[edge.consumer]) for edge in outgoing),
        output_names={output.tensor: output.name for output in route.outputs.values() if output.stage == stage.name},
        consumers=tuple(dict.fromkeys(edge.consumer for edge in outgoing)),
        release=release or chosen[stage.name].load.place(),
        absent=route.absent(stage),
    )


def _is_expected(replica: Replica) -> bool:
    """Whether it loads, or may come back by itself; not what somebody has taken out, or what belongs elsewhere."""
    return replica.gone is not None or replica.state in (ReplicaState.LOADING, ReplicaState.UNREACHABLE)


def _describe(replica: Replica) -> str:
    detail = f" ({replica.detail})" if replica.detail else ""
    return f"{replica.name} {replica.state.value.lower()}{detail}"


def _input_binding(edge: Edge, producer: Replica) -> stage_pb2.InputBinding:
    return stage_pb2.InputBinding(
        edge=edge.name, producer=producer.name, transform=edge.transform or "", apart=edge.apart
    )


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
