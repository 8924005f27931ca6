"""The spans of a request: the times in which it waited, and in which each attempt of a stage worked."""

import hashlib
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeAlias

from stagemesh.common.plugins.connectors import shown_name
from stagemesh.common.wire.telemetry import TraceParent
from stagemesh.v1 import admin_pb2, request_pb2, stage_pb2

TRACEPARENT = "traceparent"
_CURRENT: ContextVar[TraceParent | None] = ContextVar("traceparent", default=None)
Attributes: TypeAlias = Mapping[str, "str | int | float | bool"]
_MAX_INTEGER = (1 << 63) - 1
"""The largest integer in an attribute of OpenTelemetry."""
ORCHESTRATOR = "orchestrator"
"""The process of spans that belong to no replica."""
_USAGE = [each for each in request_pb2.Usage.DESCRIPTOR.fields if each.message_type is None and not each.is_repeated]


def read_trace_headers(headers: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Makes the trace context in the headers of an RPC the current one of this task and of the tasks that it starts."""
    texts = [value for name, value in headers or () if name == TRACEPARENT]
    _CURRENT.set(TraceParent.parse(texts[0]) if len(texts) == 1 and isinstance(texts[0], str) else None)


def current_traceparent() -> TraceParent | None:
    """Returns the trace context of the RPC that this task serves. Returns None if the caller sent no valid one."""
    return _CURRENT.get()


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time in which something happened. Times are in seconds since the request was received."""

    name: str
    process: str
    """The name of a replica, or ORCHESTRATOR."""
    stage: str = ""
    """The stage of the replica. Empty for ORCHESTRATOR."""
    start_s: float
    end_s: float
    path: tuple[str, ...]
    """Identifies the span within the request. Without its last part, it is the path of the parent."""
    attributes: Attributes = field(default_factory=dict[str, "str | int | float | bool"])
    error: str = ""
    """The message of the error with which it ended. Empty if it did not fail."""
    is_repeated: bool = False
    """Whether its parent has many like it: a chunk or a call of the engine."""
    links: tuple[str, ...] = ()
    """The trace contexts of the steps of other requests that were computed together with it."""


@dataclass(frozen=True)
class TraceContext:
    """The trace of a request. The id of a span depends only on its path, so that stages can know it before it ends."""

    parent: TraceParent | None = None
    """The trace context that the caller sent. None if it sent none."""
    trace_id: str = ""
    """The id of the trace, as 32 hexadecimal digits: the caller's, or a random one."""
    root_id: str = ""
    """The id of the span of the request, which is random, because several orchestrators may run the same request."""

    @classmethod
    def make(cls, parent: TraceParent | None) -> Self:
        """Returns the trace of a request. `parent` is the trace context that the caller sent, or None."""
        return cls(parent, parent.trace_id if parent is not None else secrets.token_hex(16), secrets.token_hex(8))

    def traceparent(self, path: tuple[str, ...]) -> TraceParent:
        """Returns the trace context of the span with this path."""
        digest = hashlib.blake2b("/".join(path[1:]).encode(), digest_size=8, key=self.root_id.encode())
        return TraceParent(self.trace_id, digest.hexdigest() if len(path) > 1 else self.root_id, is_sampled=True)


def is_sampled_by_caller(trace: TraceContext) -> bool:
    """Returns whether the caller has sent a trace context that says that it traces the request."""
    return trace.parent is not None and trace.parent.is_sampled


def step_path(request_id: str, stage: str, *, index: int, attempt: int) -> tuple[str, ...]:
    """Returns the path of the span of an attempt of a stage. `index` is the index of the choice."""
    return (request_id, f"{stage}/{index}/{attempt}")


def request_spans(answer: admin_pb2.GetRequestResponse) -> list[Span]:
    """Returns the spans of a request. The span of the request is the first, and parents precede their children.

    What has not ended yet ends with the present.
    """
    request = answer.request
    root = Span(
        name="request",
        process=ORCHESTRATOR,
        start_s=0.0,
        end_s=request.age_s,
        path=(request.request_id,),
        attributes={
            "request_id": request.request_id,
            "state": admin_pb2.RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower(),
            "outputs": ", ".join(request.outputs),
            "priority": request.priority,
            "choices": max(1, request.choices),
        },
        error=request.error.message,
    )
    planned_s = answer.planned_s if answer.HasField("planned_s") else request.age_s
    queue = Span(name="queue", process=ORCHESTRATOR, start_s=0.0, end_s=planned_s, path=(*root.path, "queue"))
    spans, earlier = [root, queue], defaultdict[tuple[str, int], list[admin_pb2.StepStatus]](list)
    for step in answer.steps:
        attempts = earlier[step.stage, step.index]
        if attempts:
            spans.append(_recovery_span(attempts[-1], step, root))
        attempts.append(step)
        spans += _step_spans(step, root, count=len(attempts))
    return spans


def _recovery_span(lost: admin_pb2.StepStatus, step: admin_pb2.StepStatus, root: Span) -> Span:
    """Returns the span from the end of an attempt to the plan of the next attempt of the same stage."""
    return Span(
        name=f"recovery of {_stage_name(step)}",
        process=ORCHESTRATOR,
        start_s=min(lost.ended_s, step.planned_s),
        end_s=step.planned_s,
        path=(*root.path, f"recovery/{step.stage}/{step.index}/{step.attempt}"),
        attributes={"stage": step.stage, "lost_replica": lost.replica, "error.reason": lost.error.reason},
    )


def _step_spans(step: admin_pb2.StepStatus, root: Span, *, count: int) -> Iterator[Span]:
    """Yields the spans of an attempt. `count` is 1 for the first attempt of a stage, 2 for the second, and so on."""
    name = _stage_name(step)
    path = step_path(root.path[0], step.stage, index=step.index, attempt=step.attempt)
    at_replica = partial(Span, process=step.replica, stage=step.stage)
    end_s = step.ended_s if step.HasField("ended_s") else root.end_s
    yield at_replica(
        name=name if count == 1 else f"{name}, attempt {count}",
        start_s=step.planned_s,
        end_s=end_s,
        path=path,
        attributes=_step_attributes(step),
        error=step.error.message,
    )
    start_s = step.planned_s
    for part, part_end_s in _parts(step):
        # The replica's clock and the orchestrator's differ a little.
        last_s = end_s if part_end_s is None else _within(part_end_s, start_s, end_s)
        yield at_replica(name=part, start_s=start_s, end_s=last_s, path=(*path, part))
        if part_end_s is None:
            break
        start_s = last_s
    for rebinding in step.rebindings:
        yield at_replica(
            name=f"connected again: {', '.join(rebinding.edges)}",
            start_s=rebinding.at_s,
            end_s=rebinding.at_s,
            path=(*path, f"rebinding at {rebinding.at_s}"),
        )
    for number, span in enumerate(step.spans.spans):
        if span.WhichOneof("kind"):
            yield _replica_span(span, step, path=(*path, str(number)), end_s=end_s)
    for number, span in enumerate(step.input_spans.spans):
        yield Span(
            name=f"chunk {span.chunk.edge}",
            process=ORCHESTRATOR,
            start_s=_within(span.start_s, step.planned_s, end_s),
            end_s=_within(span.end_s, step.planned_s, end_s),
            path=(*path, f"input {number}"),
            attributes=_chunk_attributes(span, end_s=end_s),
            is_repeated=True,
        )


def _replica_span(span: stage_pb2.StepSpan, step: admin_pb2.StepStatus, *, path: tuple[str, ...], end_s: float) -> Span:
    """Returns a span that the replica has reported. `end_s` is the end of its parent."""
    attributes: Attributes
    if span.HasField("chunk"):
        name, attributes = f"chunk {span.chunk.edge}", _chunk_attributes(span, end_s=end_s)
    else:
        name, attributes = "call", {"requests": span.call.requests}
    # The replica's clock begins when it accepts the step, which is slightly before the orchestrator learns of it. An
    # external stage may report any numbers.
    start_s = _within(step.accepted_s + span.start_s, step.planned_s, end_s)
    return Span(
        name=name,
        process=step.replica,
        stage=step.stage,
        start_s=start_s,
        end_s=_within(step.accepted_s + span.end_s, start_s, end_s),
        path=path,
        attributes=attributes,
        is_repeated=True,
        links=tuple(span.call.links),
    )


def _chunk_attributes(span: stage_pb2.StepSpan, *, end_s: float) -> Attributes:
    chunk = span.chunk
    return {
        "edge": chunk.edge,
        "seq": min(chunk.seq, _MAX_INTEGER),
        "bytes": min(chunk.size_bytes, _MAX_INTEGER),
        "connector": shown_name(chunk.connector),
        "wait_s": _within(chunk.sent_s - span.start_s, 0.0, end_s),
    }


def _within(value: float, least: float, most: float) -> float:
    """Returns the value in the range from `least` to `most` that is nearest to `value`, or `least` if it is NaN."""
    return least if math.isnan(value) else max(least, min(value, most))


def _stage_name(step: admin_pb2.StepStatus) -> str:
    return f"{step.stage}, choice {step.index}" if step.index else step.stage


def _parts(step: admin_pb2.StepStatus) -> Iterator[tuple[str, float | None]]:
    """Yields the parts of an attempt with their ends, one after the other. The end of the last part is None."""
    yield "wait for consumers", step.sent_s if step.HasField("sent_s") else None
    yield "send", step.accepted_s if step.HasField("accepted_s") else None
    timings = step.finished.timings
    if timings.HasField("started_s"):
        # The replica's own clock says how long after the acceptance.
        yield "wait for input", step.accepted_s + timings.started_s
    yield "first output", _first_output_s(step)
    yield "further outputs", None


def _first_output_s(step: admin_pb2.StepStatus) -> float | None:
    if step.HasField("first_output_s"):
        return step.first_output_s
    # The orchestrator receives no output of a stage that sends only to others.
    timings = step.finished.timings
    return step.accepted_s + timings.first_output_s if timings.HasField("first_output_s") else None


def _step_attributes(step: admin_pb2.StepStatus) -> dict[str, str | int | float | bool]:
    made: dict[str, str | int | float | bool] = {
        "stage": step.stage,
        "replica": step.replica,
        "attempt": step.attempt,
        "outputs": step.outputs,
        "steps": step.engine_steps,
    }
    if step.HasField("resumed_engine_steps"):
        made["resumed_steps"] = step.resumed_engine_steps
    if step.spans.dropped:
        made["dropped_spans"] = step.spans.dropped
    if step.HasField("error"):
        made["error.reason"] = step.error.reason
    if step.HasField("finished"):
        usage = step.finished.usage
        made |= {each.name: getattr(usage, each.name) for each in _USAGE if getattr(usage, each.name)}
        for edge in step.finished.edges:
            made |= {f"{edge.edge}.chunks": edge.chunks, f"{edge.edge}.bytes": edge.size_bytes}
    return made
