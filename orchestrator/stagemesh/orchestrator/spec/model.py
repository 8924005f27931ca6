"""A pipeline that has passed every check."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from stagemesh.connectors.base import ChunkPolicy, ConnectorName
from stagemesh.orchestrator.spec.graph import Arc, ancestors
from stagemesh.services.serving.config import DataPlaneConfig
from stagemesh.services.serving.plugins import OutputKind, Signature

WIRE_VERSION = 1


@dataclass(frozen=True)
class Stage:
    """One model part with one engine."""

    name: str
    engine: str
    model: Path | None
    """The model's folder or file; None where it has none, or where models were not looked for."""
    model_name: str
    """As the pipeline file has it; empty for none."""
    function: str | None
    replicas: int
    options: Mapping[str, JsonValue]
    signature: Signature
    data_plane: DataPlaneConfig = field(default_factory=DataPlaneConfig)


@dataclass(frozen=True)
class Edge:
    """A typed flow of tensors from a stage to a stage."""

    name: str
    producer: str
    consumer: str
    transform: str
    """Empty for none."""
    connector: ConnectorName
    policy: ChunkPolicy
    tensors: tuple[str, ...] = ()
    """What it carries of what its producer emits."""
    tokens: Literal["all", "last"] = "all"
    """Which rows, of tensors that have one for each token."""

    @property
    def arc(self) -> Arc:
        """The edge as an arrow."""
        return Arc(self.producer, self.consumer)


@dataclass(frozen=True)
class PipelineOutput:
    """A stage's tensor that clients may ask for, under its own name."""

    name: str
    stage: str
    tensor: str
    kind: OutputKind
    sample_rate_hz: int


@dataclass(frozen=True)
class Bounds:
    """How many requests run and wait at once, with how many bytes."""

    max_in_flight: int = sys.maxsize
    max_in_flight_bytes: int = sys.maxsize
    max_queued: int = sys.maxsize
    max_queued_bytes: int = sys.maxsize


@dataclass(frozen=True)
class Limits(Bounds):
    """What the orchestrator admits over the whole pipeline, and of each caller."""

    per_caller: Bounds = Bounds()


@dataclass(frozen=True)
class ExplainedValue:
    """A value of the pipeline and where it came from: "file:line", "default", "variable X" or "override"."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Pipeline:
    """A directed acyclic graph of stages and edges."""

    name: str
    generation: str
    """Changes with every change of a stage; replicas of different generations never share a request."""
    stages: Mapping[str, Stage]
    """Producers before consumers."""
    edges: tuple[Edge, ...]
    outputs: Mapping[str, PipelineOutput]
    limits: Limits
    source: Path
    explanation: tuple[ExplainedValue, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def arcs(self) -> frozenset[Arc]:
        """The edges as arrows."""
        return frozenset(edge.arc for edge in self.edges)

    def stages_for(self, outputs: Collection[str]) -> tuple[Stage, ...]:
        """The stages that the outputs need, producers before consumers."""
        needed = ancestors((self.outputs[name].stage for name in outputs), self.arcs)
        return tuple(stage for stage in self.stages.values() if stage.name in needed)

    def incoming(self, stage: str) -> tuple[Edge, ...]:
        """The edges that feed a stage."""
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def outgoing(self, stage: str) -> tuple[Edge, ...]:
        """The edges that a stage feeds."""
        return tuple(edge for edge in self.edges if edge.producer == stage)
