"""The feature that records engine steps of traced requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from stagemesh.common.tracing import StepTrace
from stagemesh.services.engines.base import EngineEvent
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook


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
        return _OutputSpans(trace, self._running, others=self._others)

    def _others(self, trace: StepTrace) -> list[str]:
        return [other.traceparent for other in self._traces.values() if other is not trace]


class _OutputSpans(RequestHook):
    def __init__(
        self, trace: StepTrace, running: Callable[[], int], *, others: Callable[[StepTrace], list[str]]
    ) -> None:
        self._trace, self._running, self._others = trace, running, others
        self._last_s = time.monotonic()

    def observe(self, *, finished: bool) -> Iterator[EngineEvent]:
        del finished
        last_s, self._last_s = self._last_s, time.monotonic()
        self._trace.add_call(seconds=self._last_s - last_s, requests=self._running(), links=self._others(self._trace))
        return iter(())
