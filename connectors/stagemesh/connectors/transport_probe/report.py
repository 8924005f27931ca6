"""The results of a transport measurement."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagemesh.common.connector_descriptors import ConnectorName

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB)
"""The sizes in bytes of the tensors whose one-way time is measured."""


@dataclass(frozen=True)
class ConnectorFigures:
    """The measured figures of one connector. All figures have their default values if the connector cannot be used."""

    connector: ConnectorName
    refusal: str = ""
    """The reason why the connector cannot be used. Empty if it can be used."""
    how: str = ""
    """A human-readable description of the transport. Empty if there is none."""
    one_way_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """The median time in seconds from sending a tensor to receiving it, by the tensor's size in bytes."""
    bytes_per_s: float = 0.0
    """The sustained rate in bytes per second, measured with tensors of 1 MiB."""
    cpu_s_per_gb: float = 0.0
    """The processor time of both processes in seconds for 10^9 bytes."""


@dataclass(frozen=True)
class TransportReport:
    """The measured figures of all connectors between two processes."""

    peer: str
    same_host: bool
    choice: ConnectorName
    """The connector that `connector: auto` uses."""
    passed_over: Mapping[ConnectorName, str]
    """The connectors that are better than the choice, each with the reason why it cannot be used. May be empty."""
    clock_error_s: float
    """The maximum error, in seconds, that all one-way times share. 0 within one host, which has one clock."""
    connectors: tuple[ConnectorFigures, ...]
    """The figures of each connector, best connector first."""
