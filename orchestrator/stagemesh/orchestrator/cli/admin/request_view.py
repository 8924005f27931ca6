"""One request in full: its head, its time line, its flows."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stagemesh.orchestrator.cli.admin.formatting import duration, size
from stagemesh.orchestrator.cli.admin.json_output import word_of
from stagemesh.orchestrator.cli.admin.output import make_table
from stagemesh.orchestrator.cli.admin.tables import request_state
from stagemesh.v1 import admin_pb2, chunk_pb2, control_pb2

_CONNECTORS = chunk_pb2.DESCRIPTOR.enum_types_by_name["Connector"]

_HANDED_ON = "DRAINED"


class Moment(NamedTuple):
    """Something that happened, in seconds since the request was received."""

    at_s: float
    who: str
    what: str


def request_view(answer: admin_pb2.GetRequestResponse) -> RenderableType:
    """A request in full."""
    parts: list[RenderableType] = [_head(answer), "", _steps_table(answer.steps)]
    if answer.flows:
        parts += ["", _flows_table(answer.flows)]
    return Group(*parts, "", _moments_table(answer))


def moments(answer: admin_pb2.GetRequestResponse) -> list[Moment]:
    """What happened, in order."""
    found = [Moment(0.0, "", "received")]
    if answer.HasField("planned_s"):
        found.append(Moment(answer.planned_s, "", "admitted and planned"))
    for step in answer.steps:
        found.extend(_step_moments(step))
    return sorted(found, key=lambda moment: moment.at_s)


def _head(answer: admin_pb2.GetRequestResponse) -> RenderableType:
    request = answer.request
    received = datetime.fromtimestamp(request.received_at_s).astimezone().isoformat(sep=" ", timespec="seconds")
    left = f", {duration(request.left_s)} left" if request.left_s else ""
    lines = [
        Text.assemble((request.request_id, "bold"), "  ", request_state(request.state)),
        Text(
            f"received {received}, {duration(request.age_s)} old{left}; priority {request.priority}; "
            f"outputs {', '.join(request.outputs)}; {request.pieces:,} pieces, {size(request.size_bytes)}"
        ),
    ]
    if request.HasField("error"):
        lines.append(Text(request.error.message, "red"))
    return Group(*lines)


def _steps_table(steps: Sequence[admin_pb2.StepStatus]) -> Table:
    figures = ("try", "outputs", "steps", "last heard")
    table = make_table("stage", "replica", *figures, "state", right=figures)
    for step in steps:
        total = f" of {step.total_steps}" if step.HasField("total_steps") else ""
        table.add_row(
            step.stage,
            step.replica,
            str(step.attempt),
            f"{step.outputs:,}",
            f"{step.steps:,}{total}",
            f"at {duration(step.heard_s)}" if step.HasField("heard_s") else "",
            _standing(step),
        )
    return table


def _standing(step: admin_pb2.StepStatus) -> Text:
    if step.error.reason == _HANDED_ON:
        return Text("handed on", "dim")
    if step.HasField("error"):
        return Text(f"failed: {step.error.message}", "red")
    if step.HasField("ended_s"):
        return Text("finished" if step.HasField("finished") else "ended", "dim")
    return Text(f"waits for {step.waits_for}", "yellow") if step.waits_for else Text("computes", "green")


def _flows_table(flows: Sequence[admin_pb2.FlowStatus]) -> Table:
    figures = ("sent", "in flight", "unread", "credit left")
    table = make_table("edge", "from", "to", "connector", *figures, right=figures)
    for flow in flows:
        sent, received = flow.sent, flow.received
        known_sent, known_received = flow.HasField("sent"), flow.HasField("received")
        table.add_row(
            Text(flow.edge),
            flow.producer,
            flow.consumer,
            word_of(_CONNECTORS, (sent if known_sent else received).connector),
            f"{sent.chunks:,}{' (all)' if sent.ended else ''}" if known_sent else "",
            _waiting(sent) if known_sent else "",
            _waiting(received) if known_received else "",
            size((sent if known_sent else received).credit_bytes),
        )
    return table


def _waiting(flow: control_pb2.FlowReport) -> str:
    return f"{flow.waiting_chunks:,} ({size(flow.waiting_bytes)})" if flow.waiting_chunks else "0"


def _moments_table(answer: admin_pb2.GetRequestResponse) -> Table:
    table = make_table("when", "who", "what", right=("when",))
    for moment in moments(answer):
        table.add_row(duration(moment.at_s), moment.who, Text(moment.what))
    return table


def _step_moments(step: admin_pb2.StepStatus) -> Iterator[Moment]:
    who = step.replica if step.attempt == 1 else f"{step.replica} (try {step.attempt})"
    if step.HasField("sent_s"):
        yield Moment(step.sent_s, who, "was sent its share")
    if step.HasField("accepted_s"):
        before = f", {step.queue_position} before it" if step.queue_position else ""
        resumed = f" and goes on behind step {step.resumed_steps:,}" if step.HasField("resumed_steps") else ""
        yield Moment(step.accepted_s, who, f"accepted it{resumed}{before}")
    for each in step.rebindings:
        yield Moment(each.at_s, who, f"goes on with another neighbour on {' and '.join(each.edges)}")
    if step.HasField("first_output_s"):
        yield Moment(step.first_output_s, who, "gave its first output")
    if step.HasField("ended_s"):
        yield Moment(step.ended_s, who, _ending(step))
    elif step.HasField("heard_s") and step.outputs + step.steps:
        yield Moment(step.heard_s, who, f"was heard of last: {step.outputs:,} outputs, {step.steps:,} steps")


def _ending(step: admin_pb2.StepStatus) -> str:
    if step.error.reason == _HANDED_ON:
        return "handed it on: it is drained"
    if step.HasField("error"):
        return f"failed: {step.error.message}"
    if not step.HasField("finished"):
        return "ended"
    sent = "".join(
        f"; sent {edge.chunks:,} chunks ({size(edge.size_bytes)}) on {edge.edge} by {edge.connector}"
        for edge in step.finished.edges
    )
    return f"finished: {step.outputs:,} outputs, {step.steps:,} steps{sent}"
