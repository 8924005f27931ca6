"""A pipeline that has passed every check: the entries of its file, with the values that the checks resolved."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import SkipValidation

from stagemesh.common.descriptors import OptionSpec, OutputKind, Signature
from stagemesh.orchestrator.spec.conditions import Condition, Fact, Facts, holds
from stagemesh.orchestrator.spec.graph import Arc, ancestors
from stagemesh.orchestrator.spec.schema import EdgeEntry, Limits, OutputEntry, StageEntry


class Stage(StageEntry, frozen=True):
    """One stage of a pipeline, which runs a part of the model on one engine."""

    name: str
    signature: SkipValidation[Signature]
    model_path: Path | None = None
    """The folder or file of the model. None if the stage has no model or if models were not searched for."""
    condition: SkipValidation[Condition] = ()
    """The condition that a request must fulfil for the stage to run."""

    @property
    def model_name(self) -> str:
        """The model's name or path in the pipeline file, or an empty string if the stage has no model."""
        return self.model or ""


class Edge(EdgeEntry, frozen=True):
    """A typed flow of tensors from one stage to another."""

    name: str = ""
    tensors: tuple[str, ...] = ()
    """The producer's tensors that the edge transfers."""
    brings: tuple[str, ...] = ()
    """The tensors that the consumer receives on the edge."""
    apart: bool = False
    """Whether the edge's packets are separate inputs of the consumer.

    If False, they are joined with packets of other edges.
    """
    condition: SkipValidation[Condition] = ()
    """The condition that a request must fulfil for the edge to carry packets."""

    @property
    def arc(self) -> Arc:
        """The edge as a connection in the graph of stages."""
        return Arc(self.producer, self.consumer)


class PipelineOutput(OutputEntry, frozen=True):
    """A tensor of a stage that clients may request under the name of the output."""

    name: str
    kind: OutputKind
    sample_rate_hz: int


@dataclass(frozen=True)
class ExplainedValue:
    """A value of the pipeline and its origin: "file:line", "default", "variable X" or "override"."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Route:
    """The stages that run for a request, producers before consumers, and the edges that carry its packets."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    outputs: Mapping[str, PipelineOutput]
    """The outputs that the request wants."""

    @cached_property
    def incoming(self) -> Mapping[str, tuple[Edge, ...]]:
        """The incoming edges by stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.consumer == stage.name) for stage in self.stages}

    @cached_property
    def outgoing(self) -> Mapping[str, tuple[Edge, ...]]:
        """The outgoing edges by stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.producer == stage.name) for stage in self.stages}

    def absent(self, stage: Stage) -> tuple[str, ...]:
        """Returns the tensors that a stage accepts but that no edge of the route delivers."""
        brought = {tensor for edge in self.incoming[stage.name] for tensor in edge.brings}
        return tuple(name for name in stage.signature.accepts if name not in brought)


@dataclass(frozen=True)
class Pipeline:
    """A directed acyclic graph of stages and edges."""

    name: str
    generation: str
    """A hash of the stages. A request never uses replicas of different generations."""
    stages: Mapping[str, Stage]
    """The stages by name, producers before consumers."""
    edges: tuple[Edge, ...]
    outputs: Mapping[str, PipelineOutput]
    limits: Limits
    source: Path
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    """The options that requests may set: the options of the stages, and the options that the file declares."""
    explanation: tuple[ExplainedValue, ...] = field(default=(), repr=False, compare=False)
    """Every value of the file with its origin, in the file's order."""

    def route(self, outputs: Collection[str], facts: Facts | None = None) -> Route:
        """Returns the stages and edges that a request with these outputs uses. `facts` are its other facts."""
        known = {**(facts or {}), **{Fact("output", name): 1.0 for name in outputs}}
        runs = {stage.name for stage in self.stages.values() if holds(stage.condition, known)}
        open_edges = [edge for edge in self.edges if runs >= set(edge.arc) and holds(edge.condition, known)]
        wanted = {name: self.outputs[name] for name in outputs}
        needed = ancestors((output.stage for output in wanted.values()), {edge.arc for edge in open_edges})
        return Route(
            stages=tuple(stage for stage in self.stages.values() if stage.name in needed),
            edges=tuple(edge for edge in open_edges if edge.consumer in needed),
            outputs=wanted,
        )

    def incoming(self, stage: str) -> tuple[Edge, ...]:
        """Returns the incoming edges of a stage."""
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def outgoing(self, stage: str) -> tuple[Edge, ...]:
        """Returns the outgoing edges of a stage."""
        return tuple(edge for edge in self.edges if edge.producer == stage)
