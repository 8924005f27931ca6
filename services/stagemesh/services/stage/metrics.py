"""The metrics of a replica. The names and units follow the conventions of Prometheus."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from stagemesh.connectors.flow.edge_meters import sent_metrics
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.v1 import control_pb2


class ReplicaMetrics:
    """The metrics of one replica. Call all methods on the replica's event loop."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their present values, those of the engine included."""
        yield from sent_metrics(self._runtime.data_plane.meters)
        yield from self._flows(self._runtime.reports())
        yield from self._memory()
        load = self._runtime.load()
        yield _gauge("stagemesh_engine_running_requests", "Requests that the engine computes.", load.running)
        yield _gauge("stagemesh_engine_queued_requests", "Requests that wait for the engine.", load.queued)
        # An engine that loads has no metrics yet.
        if (engine_metrics := self._runtime.engine.abilities.metrics) is not None:
            yield from engine_metrics()

    def _flows(self, reports: list[control_pb2.StepReport]) -> Iterator[Metric]:
        """Yields the sums over the flows that are open now."""
        outgoing = [flow for report in reports for flow in report.outlets]
        incoming = [flow for report in reports for flow in report.inlets]
        for name, text, flows in (
            ("stagemesh_flows", "Outgoing flows.", [(flow.edge, 1) for flow in outgoing]),
            (
                "stagemesh_flows_without_credit",
                "Outgoing flows whose next chunk waits for credit.",
                [(flow.edge, int(flow.wanted_bytes > 0)) for flow in outgoing],
            ),
            (
                "stagemesh_flow_credit_bytes",
                "Bytes that outgoing flows may send before their consumers read more.",
                [(flow.edge, flow.credit_bytes) for flow in outgoing],
            ),
            (
                "stagemesh_flow_unacknowledged_bytes",
                "Bytes of outgoing flows that consumers have not acknowledged.",
                [(flow.edge, flow.waiting_bytes) for flow in outgoing],
            ),
            (
                "stagemesh_flow_unread_bytes",
                "Bytes of incoming flows that have arrived and that the engine has not read.",
                [(flow.edge, flow.waiting_bytes) for flow in incoming],
            ),
        ):
            sums = Counter[str]()
            for edge, value in flows:
                sums[edge] += value
            family = GaugeMetricFamily(name, text, labels=("edge",))
            for edge, total in sums.items():
                family.add_metric((edge,), total)
            yield family

    def _memory(self) -> Iterator[Metric]:
        plane = self._runtime.data_plane
        yield _gauge("stagemesh_arena_bytes", "Size of the arena in bytes.", plane.arena.size_bytes)
        yield _gauge("stagemesh_arena_used_bytes", "Bytes of the arena in use.", plane.arena.used_bytes)
        yield _gauge(
            "stagemesh_retained_bytes",
            "Payload of acknowledged chunks that are retained for other consumers, in bytes.",
            plane.retained_bytes,
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
