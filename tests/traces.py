"""A receiver of traces by OTLP, and checks of the spans that it received."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, trace_pb2.Span]] = []
        self._changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        """Receives spans, with the process that each belongs to."""
        del context
        with self._changed:
            for resource in request.resource_spans:
                named = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [(named["service.instance.id"], span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, *, timeout_s: float = 20.0) -> list[tuple[str, trace_pb2.Span]]:
        """Waits for the root span of a trace. Returns the processes and the spans of the trace."""

        def spans() -> list[tuple[str, trace_pb2.Span]]:
            return [(process, span) for process, span in self._spans if span.trace_id.hex() == trace_id]

        with self._changed:
            met = self._changed.wait_for(lambda: any(span.name == "request" for _, span in spans()), timeout_s)
            assert met, f"no trace {trace_id} came within {timeout_s} s"
            return spans()

    @property
    def trace_ids(self) -> set[str]:
        """The ids of all traces so far."""
        return {span.trace_id.hex() for _, span in self.all_spans}

    @property
    def all_spans(self) -> list[tuple[str, trace_pb2.Span]]:
        """The processes and the spans of all traces so far."""
        with self._changed:
            return list(self._spans)


TRACE_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER")
"""The variables by which a process that starts exports its traces."""


@contextmanager
def receiving_traces() -> Iterator[TraceReceiver]:
    """Serves a receiver on loopback. Orchestrators that start within the block export to it what their clients trace,
    and clients of this process trace all requests.
    """
    _client_spans()
    receiver, server = TraceReceiver(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in zip(
                TRACE_VARIABLES, (f"http://127.0.0.1:{port}", "parentbased_always_off"), strict=True
            ):
                patch.setenv(variable, value)
            yield receiver
    finally:
        server.stop(None).wait()


@cache
def _client_spans() -> InMemorySpanExporter:
    """Makes this process trace its requests, as a program with OpenTelemetry does. Returns the spans of its clients."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


def last_trace(receiver: TraceReceiver) -> tuple[ReadableSpan, list[tuple[str, trace_pb2.Span]]]:
    """Returns the client's span of the last request, and the spans that the orchestrator has exported for it."""
    own = _client_spans().get_finished_spans()[-1]
    assert own.context is not None
    return own, receiver.trace(f"{own.context.trace_id:032x}")


def check_whole(own: ReadableSpan, spans: list[tuple[str, trace_pb2.Span]]) -> None:
    """Checks that the spans are one tree below the client's span, and explain the client's time."""
    assert own.context is not None
    ids = Counter(span.span_id for _, span in spans)
    assert set(ids.values()) == {1}
    roots = [span for _, span in spans if span.parent_span_id == own.context.span_id.to_bytes(8)]
    assert [span.name for span in roots] == ["request"]
    orphans = [span.name for _, span in spans if span.parent_span_id not in ids and span is not roots[0]]
    assert not orphans
    assert own.start_time is not None
    assert own.end_time is not None
    share = explained_share([span for _, span in spans], begin_ns=own.start_time, end_ns=own.end_time)
    assert share >= 0.95, f"the critical path explains {share:.3f} of the time"


def chunks_of(spans: list[tuple[str, trace_pb2.Span]]) -> Counter[str]:
    """Returns the number of chunks of each edge that have a span."""
    return Counter(span.name.removeprefix("chunk ") for _, span in spans if span.name.startswith("chunk "))


def explained_share(spans: Sequence[trace_pb2.Span], *, begin_ns: int, end_ns: int) -> float:
    """Returns the share of a time that the critical path explains: spans without children, from the end backwards.

    At each moment, the path follows the span that ended last before it. A time in which no such span runs is not
    explained.
    """
    parents = {span.parent_span_id for span in spans}
    leaves = [span for span in spans if span.span_id not in parents]
    explained_ns, now_ns = 0, end_ns
    while before := [span for span in leaves if span.start_time_unix_nano < now_ns]:
        last = max(before, key=lambda span: min(span.end_time_unix_nano, now_ns))
        last_ns = min(last.end_time_unix_nano, now_ns)
        first_ns = max(last.start_time_unix_nano, begin_ns)
        explained_ns += max(0, last_ns - first_ns)
        now_ns = last.start_time_unix_nano
    return explained_ns / (end_ns - begin_ns)
