"""The export of traces by the OpenTelemetry protocol (OTLP).

The orchestrator exports the spans of a sampled request and of its stages when the request has ended. The standard
environment variables of OpenTelemetry select the collector and the share of sampled requests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from stagemesh.common.process.settings import library_variable
from stagemesh.common.wire.telemetry import TraceParent
from stagemesh.orchestrator.admin.inspection import describe_ended
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.orchestrator.spans import ORCHESTRATOR, Span, TraceContext, request_spans

_log = logging.getLogger(__name__)

_MAX_WAITING = 64
"""The maximum number of ended requests that wait for their export. Further ones are not exported.

`History` keeps the replicas' spans of as many requests.
"""
_BATCH_SPANS = 512
_FLUSH_S = 5.0
"""The time for the waiting exports when the orchestrator stops, in seconds."""
_NS = 1_000_000_000
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class TraceExport:
    """Exports the traces of ended requests, one after the other, in a thread."""

    def __init__(self, pipeline: str) -> None:
        """`pipeline` is the name of the pipeline, which the spans have as `service.namespace`."""
        self._exporter, self._pipeline = OTLPSpanExporter(), pipeline
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._waiting = asyncio.Queue[Timeline](_MAX_WAITING)
        self._dropped = 0

    def samples(self, context: TraceContext) -> bool:
        """Returns whether a request is traced, by the sampler of OpenTelemetry that the environment variables select.

        By default, the caller's decision counts, and requests without a trace context are traced.
        """
        parent = context.parent
        given = None if parent is None else set_span_in_context(NonRecordingSpan(_span_context(parent, remote=True)))
        result = self._sampler.should_sample(given, int(context.trace_id, 16), "request")
        return result.decision is Decision.RECORD_AND_SAMPLE

    def add(self, timeline: Timeline) -> None:
        """Exports the trace of an ended request if it is traced. Drops it if too many requests wait for their export.

        An unreachable collector therefore neither delays requests nor fills the memory.
        """
        if timeline.trace is None:
            return
        try:
            self._waiting.put_nowait(timeline)
        except asyncio.QueueFull:
            self._dropped += 1

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Exports within the block. At its end, waits a few seconds for the traces that are not exported yet."""
        exporting = asyncio.create_task(self._run(), name="export traces")
        try:
            yield
        finally:
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._waiting.join()
            except TimeoutError:
                _log.warning("the collector did not accept the last %d traces in time", self._waiting.qsize() + 1)
            exporting.cancel()
            await asyncio.wait([exporting])
            await asyncio.to_thread(self._exporter.shutdown)  # pyright: ignore[reportUnknownArgumentType]

    async def _run(self) -> None:
        while True:
            timeline = await self._waiting.get()
            try:
                assert timeline.trace is not None, "only traced requests are added"
                spans = request_spans(describe_ended(timeline))
                made = otel_spans(spans, timeline.trace, began_s=timeline.received_at_s, pipeline=self._pipeline)
                # In a thread, because an exporter blocks. The request's own span is the last, as it ends last.
                await asyncio.to_thread(self._export, list(made)[::-1])
            except Exception:  # noqa: BLE001  # an exporter raises any exception
                _log.exception("the trace of request %s was not exported", timeline.request_id)
            finally:
                self._waiting.task_done()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                _log.warning("%d traces were dropped, because the collector is too slow or unreachable", dropped)

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        # The exporter repeats failed calls, and logs those that it abandons.
        for first in range(0, len(spans), _BATCH_SPANS):
            self._exporter.export(spans[first : first + _BATCH_SPANS])


def otel_spans(spans: Sequence[Span], trace: TraceContext, *, began_s: float, pipeline: str) -> Iterator[ReadableSpan]:
    """Yields the spans of a request as OpenTelemetry's.

    `began_s` is the time of the request's receipt in seconds since the Unix epoch. The spans of a replica have its
    stage as `service.name`, and its name as `service.instance.id`.
    """
    resource_of = cache(partial(_resource, pipeline))
    for span in spans:
        is_root = len(span.path) == 1
        parent = trace.parent if is_root else trace.traceparent(span.path[:-1])
        yield ReadableSpan(
            span.name,
            context=_span_context(trace.traceparent(span.path)),
            parent=None if parent is None else _span_context(parent, remote=is_root),
            resource=resource_of(span.stage, span.process),
            attributes={f"stagemesh.{name}": value for name, value in span.attributes.items()},
            links=[Link(_span_context(link)) for text in span.links if (link := TraceParent.parse(text)) is not None],
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int((began_s + span.start_s) * _NS),
            end_time=int((began_s + span.end_s) * _NS),
        )


def _resource(pipeline: str, stage: str, process: str) -> Resource:
    attributes = {"service.namespace": pipeline, "service.instance.id": process}
    if process != ORCHESTRATOR:
        attributes["service.name"] = stage
    elif not library_variable("OTEL_SERVICE_NAME"):
        attributes["service.name"] = "stagemesh-orchestrator"
    return Resource.create(attributes)


def _span_context(parent: TraceParent, *, remote: bool = False) -> SpanContext:
    flags = _SAMPLED if parent.is_sampled else TraceFlags()
    return SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=remote, trace_flags=flags)
