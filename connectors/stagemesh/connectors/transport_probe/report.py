"""The results of a measurement."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagemesh.common.connector_descriptors import ConnectorName

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB)
"""The sizes in bytes of the tensors whose one-way time is measured."""


@dataclass(frozen=True)
class ConnectorFigures:
    """The figures of one connector. They are absent if it cannot be used."""

    connector: ConnectorName
    refusal: str = ""
    """Why the connector cannot be used. Empty if it can."""
    how: str = ""
    """A description of the transport, for people."""
    one_way_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """The median time by size: from a tensor of the sending engine to a tensor of the receiving one."""
    bytes_per_s: float = 0.0
    """The sustained rate of tensors of 1 MiB."""
    cpu_s_per_gb: float = 0.0
    """The processor time of both processes for 10^9 bytes."""


@dataclass(frozen=True)
class TransportReport:
    """All connectors between two processes, best first."""

    peer: str
    same_host: bool
    choice: ConnectorName
    """The connector that `connector: auto` uses."""
    passed_over: Mapping[ConnectorName, str]
    """Better connectors than the choice, with the reason why each cannot be used."""
    clock_error_s: float
    """The error that all one-way times may share. 0 on one host, which has one clock."""
    connectors: tuple[ConnectorFigures, ...]
