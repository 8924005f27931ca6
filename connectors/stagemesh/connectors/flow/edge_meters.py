"""Counts of the chunks that a data plane has sent, by edge and connector, and the metrics of these counts.

The counts are updated for each acknowledged chunk. Names and units of metrics follow the conventions of Prometheus.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stagemesh.common.plugins.connectors import ConnectorName
from stagemesh.common.wire.telemetry import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MAX_METERS = 1024
OTHER_EDGES = "other"
"""The name under which further edges are counted together after `_MAX_METERS` pairs of an edge and a connector."""


class EdgeMeter:
    """The counts of one edge over one connector. A chunk that is sent to several consumers counts for each of them."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """The payload of the acknowledged chunks, in bytes."""
        self.transfer_s = Histogram(_SECONDS)
        """The seconds from the sending of each chunk to its acknowledgement."""
        self.resent = 0
        """The number of chunks that were sent again, because a stream broke or another consumer took over."""
        self.credit_wait_s = 0.0
        """The time for which chunks waited for credit, in seconds."""

    def add(self, size_bytes: int, transfer_s: float) -> None:
        """Adds an acknowledged chunk."""
        self.size_bytes += size_bytes
        self.transfer_s.add(transfer_s)


class EdgeMeters:
    """The meters of all edges of a data plane."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, ConnectorName], EdgeMeter] = {}

    def of(self, edge: str, connector: ConnectorName) -> EdgeMeter:
        """Returns the meter of an edge over a connector, or of OTHER_EDGES if there are too many meters."""
        key = (edge, connector)
        if key not in self._meters and len(self._meters) >= _MAX_METERS:
            key = (OTHER_EDGES, connector)
        return self._meters.setdefault(key, EdgeMeter())

    def __iter__(self) -> Iterator[tuple[str, ConnectorName, EdgeMeter]]:
        """Iterates over the edges, the connectors and the meters."""
        return ((edge, connector, meter) for (edge, connector), meter in self._meters.items())


_LABELS = ("edge", "connector")


def sent_metrics(meters: EdgeMeters) -> Iterator["Metric"]:
    """Returns the metrics of all meters with their current values."""
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    size_bytes = CounterMetricFamily(
        "stagemesh_sent_bytes", "Payload of chunks that consumers have acknowledged, in bytes.", labels=_LABELS
    )
    resent = CounterMetricFamily(
        "stagemesh_resent_chunks",
        "Chunks that were sent again, because a stream broke or another consumer took over.",
        labels=_LABELS,
    )
    credit = CounterMetricFamily(
        "stagemesh_credit_wait_seconds", "Seconds for which chunks waited for credit.", labels=_LABELS
    )
    transfer = HistogramMetricFamily(
        "stagemesh_chunk_transfer_seconds",
        "Seconds from the sending of a chunk to its acknowledgement.",
        labels=_LABELS,
    )
    for edge, connector, meter in meters:
        labels = (edge, connector)
        size_bytes.add_metric(labels, meter.size_bytes)
        resent.add_metric(labels, meter.resent)
        credit.add_metric(labels, meter.credit_wait_s)
        transfer.add_metric(labels, list(meter.transfer_s.buckets()), meter.transfer_s.sum)
    return iter((size_bytes, resent, credit, transfer))
