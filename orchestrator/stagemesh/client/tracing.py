"""The span of a request in the caller's trace, if the caller's program uses OpenTelemetry."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from stagemesh.common.errors import StagemeshError

Headers = tuple[tuple[str, str], ...]


@contextmanager
def request_span(name: str, attributes: Mapping[str, str]) -> Generator[Headers]:
    """Yields the headers for the calls of a request. They name a span, which is a child of the current one and lasts as
    long as the block.

    If the program has not imported OpenTelemetry, or does not record spans, there is no span and there are no headers.
    """
    if "opentelemetry" not in sys.modules:
        yield ()
        return
    from opentelemetry import propagate, trace

    span = trace.get_tracer("stagemesh.client").start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    try:
        yield tuple(carrier.items())
    except StagemeshError as exc:
        span.set_status(trace.StatusCode.ERROR, exc.message)
        raise
    finally:
        span.end()
