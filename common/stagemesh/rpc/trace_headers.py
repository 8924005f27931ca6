"""The trace context of an RPC, which callers send as the header `traceparent` (W3C Trace Context)."""

from contextvars import ContextVar
from typing import Any, Protocol

from stagemesh.common.tracing import TraceParent

TRACEPARENT = "traceparent"
_CURRENT: ContextVar[TraceParent | None] = ContextVar("traceparent", default=None)


class HeaderContext(Protocol):
    """The method of grpc.aio.ServicerContext that returns the headers of the RPC."""

    def invocation_metadata(self) -> Any:
        """Returns the headers as pairs of names and values, or None."""
        ...


def read_trace_headers(context: HeaderContext) -> None:
    """Makes the trace context in the headers of an RPC the current one of this task and of the tasks that it starts."""
    texts = [value for name, value in context.invocation_metadata() or () if name == TRACEPARENT]
    _CURRENT.set(TraceParent.parse(texts[0]) if len(texts) == 1 and isinstance(texts[0], str) else None)


def current_traceparent() -> TraceParent | None:
    """Returns the trace context of the RPC that this task serves. Returns None if the caller sent no valid one."""
    return _CURRENT.get()
