"""A pipeline that has passed every check: the entries of its file with everything that the checks resolved."""

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
    """One model part with one engine."""

    name: str
    signature: SkipValidation[Signature]
    model_path: Path | None = None
    """The model's folder or file. None for a stage without a model, and if models were not searched for."""
    condition: SkipValidation[Condition] = ()
    """The stage runs for requests that fulfil this condition."""

    @property
    def model_name(self) -> str:
        """The model as the pipeline file names it, or an empty string."""
        return self.model or ""


class Edge(EdgeEntry, frozen=True):
    """A typed flow of tensors from a stage to a stage."""

    name: str = ""
    tensors: tuple[str, ...] = ()
    """The tensors of its producer that the edge carries."""
    brings: tuple[str, ...] = ()
    """The tensors that its consumer receives."""
    apart: bool = False
    """Whether its packets are separate inputs of its consumer, not joined with those of other edges."""
    condition: SkipValidation[Condition] = ()
    """The edge carries packets for requests that fulfil this condition."""

    @property
    def arc(self) -> Arc:
        """The edge in the graph of stages."""
        return Arc(self.producer, self.consumer)


class PipelineOutput(OutputEntry, frozen=True):
    """A stage's tensor that clients may request, under a name of its own."""

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
    """The stages that run for a request, producers before consumers, and the edges that carry packets for it."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    outputs: Mapping[str, PipelineOutput]
    """The outputs that the request wants."""

    @cached_property
    def incoming(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges that lead to each stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.consumer == stage.name) for stage in self.stages}

    @cached_property
    def outgoing(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges that leave each stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.producer == stage.name) for stage in self.stages}

    def absent(self, stage: Stage) -> tuple[str, ...]:
        """Returns the tensors that a stage accepts and that no edge of the route brings."""
        brought = {tensor for edge in self.incoming[stage.name] for tensor in edge.brings}
        return tuple(name for name in stage.signature.accepts if name not in brought)


@dataclass(frozen=True)
class Pipeline:
    """A directed acyclic graph of stages and edges."""

    name: str
    generation: str
    """A hash of the stages. Replicas of different generations never share a request."""
    stages: Mapping[str, Stage]
    """Producers before consumers."""
    edges: tuple[Edge, ...]
    outputs: Mapping[str, PipelineOutput]
    limits: Limits
    source: Path
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    """The options that requests may set: those of the stages and those that the file declares."""
    explanation: tuple[ExplainedValue, ...] = field(default=(), repr=False, compare=False)
    """Every value of the file, in its order, with its origin."""

    def route(self, outputs: Collection[str], facts: Facts | None = None) -> Route:
        """Returns the part of the pipeline that a request with these outputs and these other facts takes."""
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
        """Returns the edges that lead to a stage."""
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def outgoing(self, stage: str) -> tuple[Edge, ...]:
        """Returns the edges that leave a stage."""
        return tuple(edge for edge in self.edges if edge.producer == stage)
