"""The calls of an engine: how long they take, and for how many requests each computes."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from stagemesh.common.wire.telemetry import Histogram, StepTrace

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


class EngineCalls:
    """Measures the calls of one engine, and adds them to the traces of their requests. Use it on the event loop."""

    def __init__(self) -> None:
        self._seconds, self._requests = Histogram(_SECONDS), Histogram(_REQUESTS)

    def add(self, traces: Iterable[StepTrace | None], *, seconds: float) -> None:
        """Adds a call that has just ended after `seconds` seconds.

        `traces` has one item for each request of the call: None for a request that is not traced. The spans of requests
        that are traced refer to each other.
        """
        traces = list(traces)
        self._seconds.add(seconds)
        self._requests.add(len(traces))
        traced = [trace for trace in traces if trace is not None]
        for trace in traced:
            links = (other.traceparent for other in traced if other is not trace)
            trace.add_call(seconds=seconds, requests=len(traces), links=links)

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of all calls so far."""
        for name, text, histogram in (
            ("seconds", "Seconds of a call of the engine: of a function, or a denoising step.", self._seconds),
            ("requests", "Requests that a call of the engine computes together.", self._requests),
        ):
            family = HistogramMetricFamily(f"stagemesh_engine_call_{name}", text)
            family.add_metric((), list(histogram.buckets()), histogram.sum)
            yield family
