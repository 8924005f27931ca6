"""What measuring finds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagemesh.common.connector_descriptors import ConnectorName

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB)
"""Of the tensors whose way is timed, in bytes."""


@dataclass(frozen=True)
class ConnectorFigures:
    """One connector. Without figures where it cannot be used."""

    connector: ConnectorName
    refusal: str = ""
    """Why it cannot be used; empty where it can."""
    how: str = ""
    """How the bytes cross, for people."""
    one_way_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """The median by size: from a tensor in one engine's hands to a tensor in the other's."""
    bytes_per_s: float = 0.0
    """Sustained, in tensors of 1 MiB."""
    cpu_s_per_gb: float = 0.0
    """Processor time of both processes for 10^9 bytes."""


@dataclass(frozen=True)
class TransportReport:
    """All connectors between two processes, best first."""

    peer: str
    same_host: bool
    choice: ConnectorName
    """What `connector: auto` uses."""
    passed_over: Mapping[ConnectorName, str]
    """The better ones, and why they cannot be used."""
    clock_error_s: float
    """By how much the one-way times may be off, all by the same; 0 on one host, which has one clock."""
    connectors: tuple[ConnectorFigures, ...]
