"""The load of the vllm engine, vLLM's own metrics, and spans for the engine steps of traced requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from prometheus_client import REGISTRY, Metric

from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.services.engines.base import EngineLoad
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook

_LOAD_SMOOTHING = 0.1
USUAL_TOKENS = 256
"""The estimated length of an output in tokens if the request does not limit it."""


def vllm_metrics() -> Iterator[Metric]:
    """Yields vLLM's own metrics, which it adds to the process's default registry."""
    return (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))


class LoadMeter:
    """Measures the load of an engine: the numbers of running and queued requests, and the estimated remaining work.

    The estimate is based on the number of tokens that the requests may still sample and on the measured time per token.
    """

    def __init__(self) -> None:
        self._tokens_left: dict[str, int] = {}
        self._token_s = 0.0
        self._last_token_s = time.monotonic()

    def begin(self, name: str, tokens: int) -> None:
        """Adds the request `name`, which is expected to sample `tokens` tokens."""
        self._tokens_left[name] = tokens

    def count(self, name: str, new_tokens: int) -> None:
        """Records that the request `name` has sampled `new_tokens` more tokens.

        Updates the estimated time per token and the number of tokens that the request may still sample.
        """
        if not new_tokens:
            return
        now_s, tokens_left = time.monotonic(), self._tokens_left
        sample_s = min(1.0, now_s - self._last_token_s) * len(tokens_left)
        self._token_s += _LOAD_SMOOTHING * (sample_s - self._token_s)
        self._last_token_s = now_s
        tokens_left[name] = max(0, tokens_left[name] - new_tokens)

    def end(self, name: str) -> None:
        """Removes the request `name`, which has finished or was aborted."""
        del self._tokens_left[name]

    def load(self, *, max_running: int) -> EngineLoad:
        """Returns the load. `max_running` is the number of requests that the engine can run at the same time."""
        held = len(self._tokens_left)
        running = min(held, max_running)
        rounds = sum(self._tokens_left.values()) / max(1, running)
        return EngineLoad(running, held - running, work_s=rounds * self._token_s)


class StepSpans(RequestFeature):
    """Records a span for each output of vLLM: the time since the request's last output, or since it was sent to vLLM.

    `running` returns the number of requests that vLLM computes together. The spans of requests that are traced at the
    same time refer to each other.
    """

    def __init__(self, running: Callable[[], int]) -> None:
        self._running = running
        self._traces = dict[str, StepTrace]()

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        trace = request.task.trace
        if trace is None:
            return None
        self._traces[request.name] = trace
        held.callback(self._traces.pop, request.name)
        return _OutputSpans(trace, self)

    def add(self, trace: StepTrace, *, seconds: float) -> None:
        """Adds a span of this duration to the trace of a running request."""
        links = [other.traceparent for other in self._traces.values() if other is not trace]
        trace.add_call(seconds=seconds, requests=self._running(), links=links)


class _OutputSpans(RequestHook):
    def __init__(self, trace: StepTrace, spans: StepSpans) -> None:
        self._trace, self._spans, self._last_s = trace, spans, time.monotonic()

    def observe(self, *, finished: bool) -> tuple[()]:  # noqa: ARG002  # each output has a span
        last_s, self._last_s = self._last_s, time.monotonic()
        self._spans.add(self._trace, seconds=self._last_s - last_s)
        return ()
