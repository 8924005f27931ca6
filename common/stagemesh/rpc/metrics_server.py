"""Serves metrics to Prometheus by HTTP. Metrics are computed when they are scraped."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from stagemesh.rpc.server import listen_error, parse_address

_log = logging.getLogger(__name__)

_COMPUTE_TIMEOUT_S = 5.0
"""Time limit for the event loop to compute the metrics. A scrape that takes longer fails."""


class _LoopCollector(Collector):
    """Collects metrics on the event loop. A thread of the HTTP server calls `collect`."""

    def __init__(self, compute: Callable[[], Iterable[Metric]], labels: Mapping[str, str]) -> None:
        self._compute_on_loop, self._labels = compute, labels
        self._loop = asyncio.get_running_loop()
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        computing = asyncio.run_coroutine_threadsafe(self._compute(), self._loop)
        for metric in (*computing.result(_COMPUTE_TIMEOUT_S), *self._process.collect()):
            if self._labels:
                metric.samples = [
                    sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples
                ]
            yield metric

    async def _compute(self) -> list[Metric]:
        return list(self._compute_on_loop())


@asynccontextmanager
async def serving_metrics(
    compute: Callable[[], Iterable[Metric]], listen: str, *, labels: Mapping[str, str] | None = None
) -> AsyncGenerator[int]:
    """Serves metrics at the address `listen` ("host:port") while the block runs. Yields the port number.

    Raises NotReadyError if the port is in use (PORT_IN_USE) or cannot be bound for another reason (CANNOT_LISTEN).

    - `compute` returns the metrics. It is called on the event loop. The metrics of the process are added to them.
    - `labels` are added to every sample.
    """
    host, port = parse_address(listen)
    registry = CollectorRegistry()
    registry.register(_LoopCollector(compute, labels or {}))
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
