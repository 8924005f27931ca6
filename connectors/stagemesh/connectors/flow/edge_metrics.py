"""The metrics of what a process sends over edges. The names and units follow the conventions of Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from stagemesh.connectors.flow.edge_meters import EdgeMeters

_LABELS = ("edge", "connector")


def sent_metrics(meters: EdgeMeters) -> Iterator[Metric]:
    """Yields the metrics with their present values."""
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
