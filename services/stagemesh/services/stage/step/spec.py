"""What a caller of ExecuteStep asks for, free of the wire."""

from collections.abc import Mapping
from dataclasses import dataclass

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.connectors.edge import ChunkPolicy
from stagemesh.services.engines.base import Task, TokenSelection

STATE_EDGE = "@state"
"""Beside a pipeline's edges: carries the state of a request that is paused to where it goes on."""


@dataclass(frozen=True)
class InputBinding:
    """An incoming edge, and the replica that feeds it."""

    edge: str
    producer: str
    transform: str = ""
    """The name of a transform; empty for none."""
    apart: bool = False
    """Whether its packets are inputs of their own."""
    attempt: int = 0
    """Of the edge's flow; 0 is the step's."""


@dataclass(frozen=True)
class OutputBinding:
    """An outgoing edge, and the replica that it feeds."""

    edge: str
    consumer: str
    endpoint: str
    connector: ConnectorName
    policy: ChunkPolicy
    tensors: frozenset[str] = frozenset()
    """The emitted tensors that it carries; empty for all."""
    tokens: TokenSelection = "all"
    attempt: int = 0
    """Of the edge's flow; 0 is the step's."""


@dataclass(frozen=True)
class StepSpec:
    """One stage's share of a request."""

    step_id: str
    attempt: int
    task: Task
    """What the engine is to do; its inlets are opened by the run."""
    inputs: tuple[InputBinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()
    streamed: tuple[str, ...] = ()
    """The emitted tensors that the caller hears."""
    fingerprint: bytes = b""
    """Equal for calls of equal content."""

    @property
    def takes_state(self) -> bool:
        """Whether the state that it goes on from comes over an edge."""
        return any(binding.edge == STATE_EDGE for binding in self.inputs)

    @property
    def request_id(self) -> str:
        """The request."""
        return self.task.request_id


@dataclass(frozen=True)
class InputRebinding:
    """An incoming edge's new producer."""

    binding: InputBinding
    first_rows: Mapping[str, int]
    """Rows of each tensor before the first that the new flow brings; 0 where not named."""


@dataclass(frozen=True)
class Rebinding:
    """The new replicas at the other ends of some of a step's edges."""

    request_id: str
    step_id: str
    inputs: tuple[InputRebinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()
