"""The metrics of an orchestrator: its scaling signals, and those of its requests, stages, edges and replicas."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from stagemesh.orchestrator.metrics.requests import RequestMetrics
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.scaling.signals import Metric as Signal
from stagemesh.orchestrator.scaling.signals import ScalingSignals

_HELP = {
    Signal.QUEUED: "Seconds of work that waits for the stage: this orchestrator's part of the replicas' queues, and "
    "its requests that are not planned yet.",
    Signal.PLAYOUT: "Audio streams of this orchestrator that the stage emits and that are about to run dry.",
    Signal.IN_FLIGHT: "Steps of this orchestrator that run or wait at the stage's replicas.",
}


class OrchestratorMetrics:
    """The metrics of an orchestrator. Call all methods on the orchestrator's event loop."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._signals = ScalingSignals(orchestrator)
        self._requests = RequestMetrics(orchestrator)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their present values."""
        yield from self._scaling()
        yield from self._requests.collect()

    def _scaling(self) -> Iterator[Metric]:
        by_stage = self._signals.by_stage()
        for signal in Signal:
            family = GaugeMetricFamily(signal.value, _HELP[signal], labels=("stage",))
            for stage, signals in by_stage.items():
                family.add_metric((stage,), signals.own(signal))
            yield family
