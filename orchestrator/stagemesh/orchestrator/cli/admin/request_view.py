"""The display of one request: its summary, its steps on the stages, its flows between replicas, and its timeline."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from stagemesh.orchestrator.cli.admin.views import request_state
from stagemesh.orchestrator.cli.output import (
    Cell,
    Column,
    connector_name,
    duration,
    make_table,
    number,
    size,
    to_text,
)
from stagemesh.v1 import admin_pb2, control_pb2

# The reason that a drained replica reports for a step that continues on another replica.
_MOVED = "DRAINED"


class Moment(NamedTuple):
    """One entry of a request's timeline. `at_s` is in seconds since the request was received."""

    at_s: float
    source: str
    event: str


def request_view(answer: admin_pb2.GetRequestResponse) -> RenderableType:
    """Returns a display of everything that the server reports about a request."""
    parts: list[RenderableType] = [_summary(answer.request), "", make_table(_STEPS, answer.steps)]
    if answer.flows:
        parts += ["", make_table(_FLOWS, answer.flows)]
    return Group(*parts, "", make_table(_TIMELINE, moments(answer)))


def moments(answer: admin_pb2.GetRequestResponse) -> list[Moment]:
    """Returns the timeline of a request, earliest entry first."""
    timeline = [Moment(0.0, "", "received")]
    if answer.HasField("planned_s"):
        timeline.append(Moment(answer.planned_s, "", "admitted and planned"))
    for step in answer.steps:
        timeline.extend(_step_moments(step))
    return sorted(timeline, key=lambda moment: moment.at_s)


def _summary(request: admin_pb2.RequestStatus) -> RenderableType:
    received = datetime.fromtimestamp(request.received_at_s).astimezone().isoformat(sep=" ", timespec="seconds")
    left = f", {duration(request.left_s)} until its deadline" if request.left_s else ""
    lines = [
        Text.assemble((request.request_id, "bold"), "  ", to_text(request_state(request))),
        Text(
            f"received {received}, age {duration(request.age_s)}{left}; priority {request.priority}; "
            f"outputs {', '.join(request.outputs)}: {request.pieces:,} messages, {size(request.size_bytes)}"
        ),
    ]
    if request.HasField("error"):
        lines.append(Text(request.error.message, "red"))
    return Group(*lines)


def _step_count(step: Any) -> str:
    return f"{step.steps:,}" + (f" of {step.total_steps}" if step.HasField("total_steps") else "")


def _step_state(step: Any) -> Cell:
    if step.error.reason == _MOVED:
        return [("moved to another replica", "dim")]
    if step.HasField("error"):
        return [(f"failed: {step.error.message}", "red")]
    if step.HasField("ended_s"):
        return [("finished" if step.HasField("finished") else "ended", "dim")]
    return [(f"waits for {step.waits_for}", "yellow") if step.waits_for else ("computes", "green")]


_STEPS = (
    Column("stage", lambda step: step.stage),
    Column("replica", lambda step: step.replica),
    number("attempt", lambda step: step.attempt),
    number("outputs", lambda step: step.outputs),
    number("steps", _step_count),
    number("last report", lambda step: f"at {duration(step.heard_s)}" if step.HasField("heard_s") else ""),
    Column("state", _step_state),
)


def _newest(flow: Any) -> control_pb2.FlowReport:
    """Returns the producer's report of a flow, or the consumer's report if the producer sent none."""
    report: control_pb2.FlowReport = flow.sent if flow.HasField("sent") else flow.received
    return report


def _waiting(flow: Any, end: str) -> str:
    if not flow.HasField(end):
        return ""
    report: control_pb2.FlowReport = getattr(flow, end)
    return f"{report.waiting_chunks:,} ({size(report.waiting_bytes)})" if report.waiting_chunks else "0"


_FLOWS = (
    Column("edge", lambda flow: flow.edge),
    Column("from", lambda flow: flow.producer),
    Column("to", lambda flow: flow.consumer),
    Column("connector", lambda flow: connector_name(_newest(flow).connector)),
    number(
        "sent",
        lambda flow: f"{flow.sent.chunks:,}{' (all)' if flow.sent.ended else ''}" if flow.HasField("sent") else "",
    ),
    number("in flight", lambda flow: _waiting(flow, "sent")),
    number("unread", lambda flow: _waiting(flow, "received")),
    number("credit left", lambda flow: size(_newest(flow).credit_bytes)),
)
_TIMELINE = (
    number("time", lambda moment: duration(moment.at_s)),
    Column("source", lambda moment: moment.source),
    Column("event", lambda moment: moment.event),
)


def _step_moments(step: admin_pb2.StepStatus) -> Iterator[Moment]:
    source = step.replica if step.attempt == 1 else f"{step.replica} (attempt {step.attempt})"
    if step.HasField("sent_s"):
        yield Moment(step.sent_s, source, "was sent the step")
    if step.HasField("accepted_s"):
        queued = f", {step.queue_position} before it in the queue" if step.queue_position else ""
        resumed = f" and resumes after engine step {step.resumed_steps:,}" if step.HasField("resumed_steps") else ""
        yield Moment(step.accepted_s, source, f"accepted the step{resumed}{queued}")
    for each in step.rebindings:
        yield Moment(each.at_s, source, f"was connected to another replica on {' and '.join(each.edges)}")
    if step.HasField("first_output_s"):
        yield Moment(step.first_output_s, source, "sent its first output")
    if step.HasField("ended_s"):
        yield Moment(step.ended_s, source, _ending(step))
    elif step.HasField("heard_s") and step.outputs + step.steps:
        yield Moment(step.heard_s, source, f"last report: {step.outputs:,} outputs, {step.steps:,} engine steps")


def _ending(step: admin_pb2.StepStatus) -> str:
    if step.error.reason == _MOVED:
        return "released the step for another replica, because it is drained"
    if step.HasField("error"):
        return f"failed: {step.error.message}"
    if not step.HasField("finished"):
        return "ended"
    sent = "".join(
        f"; sent {edge.chunks:,} chunks ({size(edge.size_bytes)}) on {edge.edge} by {edge.connector}"
        for edge in step.finished.edges
    )
    return f"finished: {step.outputs:,} outputs, {step.steps:,} engine steps{sent}"
