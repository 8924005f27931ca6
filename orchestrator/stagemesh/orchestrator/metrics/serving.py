"""Serves the metrics of an orchestrator to Prometheus by HTTP. Metrics are computed when they are scraped."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stagemesh.orchestrator.metrics.requests import RequestMetrics
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.scaling.signals import Metric as Signal
from stagemesh.orchestrator.scaling.signals import ScalingSignals
from stagemesh.rpc.server import listen_error, parse_address

_log = logging.getLogger(__name__)

_HELP = {
    Signal.QUEUED: "Seconds of work that waits for the stage: this orchestrator's part of the replicas' queues, and "
    "its requests that are not planned yet.",
    Signal.PLAYOUT: "Audio streams of this orchestrator that the stage emits and that are about to run dry.",
    Signal.IN_FLIGHT: "Steps of this orchestrator that run or wait at the stage's replicas.",
}
_COMPUTE_TIMEOUT_S = 5.0
"""Time limit for the event loop to compute the metrics. A scrape that takes longer fails."""


class OrchestratorCollector(Collector):
    """Collects the metrics of an orchestrator. `collect` is called by a thread of the HTTP server."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        """Must be called on the orchestrator's event loop."""
        self._signals = ScalingSignals(orchestrator)
        self._requests = RequestMetrics(orchestrator)
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        # The state of the orchestrator may be read on its event loop only.
        computing = asyncio.run_coroutine_threadsafe(self._compute(), self._loop)
        return computing.result(_COMPUTE_TIMEOUT_S)

    async def _compute(self) -> list[Metric]:
        return [*self._scaling(), *self._requests.collect()]

    def _scaling(self) -> Iterator[Metric]:
        by_stage = self._signals.by_stage()
        for signal in Signal:
            family = GaugeMetricFamily(signal.value, _HELP[signal], labels=("stage",))
            for stage, signals in by_stage.items():
                family.add_metric((stage,), signals.own(signal))
            yield family


@asynccontextmanager
async def serving_metrics(orchestrator: Orchestrator, listen: str) -> AsyncGenerator[int]:
    """Serves the metrics at the address `listen` ("host:port") while the block runs. Yields the port number.

    Raises NotReadyError if the port is in use (PORT_IN_USE) or cannot be bound for another reason (CANNOT_LISTEN).
    """
    host, port = parse_address(listen)
    registry = CollectorRegistry()
    registry.register(OrchestratorCollector(orchestrator))
    ProcessCollector(registry=registry)
    try:
        # In a thread, because the server looks up the name of its own host.
        server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    except OSError as exc:
        raise listen_error(host, port) from exc
    _log.info("metrics at %s:%d", host, server.server_port)
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
