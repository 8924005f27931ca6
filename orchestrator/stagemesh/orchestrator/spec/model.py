"""A pipeline that has passed every check."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.common.descriptors import OptionSpec, OutputKind, Signature
from stagemesh.common.stage_config import STALL_S, DataPlaneConfig
from stagemesh.connectors.edge import ChunkPolicy
from stagemesh.orchestrator.spec.conditions import Condition, Facts
from stagemesh.orchestrator.spec.graph import Arc
from stagemesh.orchestrator.spec.routes import Route, find_route


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
    stall_s: float = STALL_S
    """When a replica of it is thought to hang; see StageConfig."""
    when: Condition = ()
    """It runs for requests that fulfil this."""


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
    when: Condition = ()
    """It carries something for requests that fulfil this."""
    apart: bool = False
    """Whether its packets are inputs of their own to its consumer."""
    brings: tuple[str, ...] = ()
    """The tensors that its consumer gets."""

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
    max_unread_bytes: int = 256 << 20
    """How far a request's callers may stay behind what it makes."""


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
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    """What requests may set, of its stages and of its own."""
    explanation: tuple[ExplainedValue, ...] = field(default=(), repr=False, compare=False)

    def route(self, outputs: Collection[str], facts: Facts | None = None) -> Route:
        """What a request takes of it that wants these outputs and of which these other facts are known."""
        return find_route(self, outputs, facts or {})

    def incoming(self, stage: str) -> tuple[Edge, ...]:
        """The edges that feed a stage."""
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def outgoing(self, stage: str) -> tuple[Edge, ...]:
        """The edges that a stage feeds."""
        return tuple(edge for edge in self.edges if edge.producer == stage)
