"""Displays of AdminService's answers: tables of lists, and one request with its steps, flows and timeline."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from stagemesh.cli.terminal.output import connector_name, duration, links_table, size
from stagemesh.cli.terminal.tables import Cell, Column, fields, make_table, number, numbers, state_cell, to_text
from stagemesh.common.wire.encoding import enum_word

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stagemesh.v1 import admin_pb2, control_pb2


# The reason that a drained replica reports for a step that continues on another replica.
_MOVED = "DRAINED"


def request_state(request: Any) -> Cell:
    """Returns a table cell with the state of a request, in the color of the state."""
    from stagemesh.v1 import admin_pb2

    return state_cell(enum_word(admin_pb2.RequestState.DESCRIPTOR, request.state))


def replica_state(replica: Any) -> Cell:
    """Returns a table cell with the state of a replica in the color of the state, followed by the state's detail."""
    from stagemesh.v1 import stage_pb2

    state = enum_word(stage_pb2.ReplicaState.DESCRIPTOR, replica.state) if replica.state else ""
    return state_cell(state, replica.detail)


def ready_replicas(stage: Any) -> Cell:
    """Returns a table cell with the numbers of ready and of all replicas of a stage, such as "1 of 2"."""
    style = "green" if stage.ready == stage.replicas and stage.ready else "yellow" if stage.ready else "red"
    return [(f"{stage.ready} of {stage.replicas}", style)]


def arena(load: Any) -> str:
    """Formats how much of an arena is used, such as "40% of 67.1 MB".

    Returns an empty string if the size of the arena is unknown.
    """
    if not load.arena_size_bytes:
        return ""
    return f"{load.arena_used_bytes / load.arena_size_bytes:.0%} of {size(load.arena_size_bytes)}"


PIPELINES = (
    Column("pipeline", lambda each: each.name),
    Column("generation", lambda each: each.generation),
    Column("state", lambda each: [("ready", "green") if each.ready else ("not ready", "red")]),
    number("in flight", lambda each: f"{each.in_flight} of {each.max_in_flight}"),
    *numbers("queued", "finished", "failed", "cancelled", "sessions"),
    number("up", lambda each: duration(each.uptime_s)),
)
CALLERS = (
    Column("caller", lambda each: each.caller or [("without a name", "dim")]),
    number("in flight", lambda each: each.in_flight),
    number("bytes", lambda each: size(each.in_flight_bytes)),
    number("queued", lambda each: each.queued),
    number("queued bytes", lambda each: size(each.queued_bytes)),
)
STAGE_WORK = (
    number("ready", ready_replicas),
    *numbers("running", "queued"),
    number("work left", lambda each: duration(each.work_s)),
)
_SCALING_SIGNALS = {
    "queued_s": number("work waits", lambda each: duration(each.queued_s)),
    "playout_at_risk": number("audio at risk", lambda each: each.playout_at_risk),
}
STAGES = (
    Column("stage", lambda each: each.name),
    *fields("engine", "model"),
    *STAGE_WORK,
    *numbers("finished", "failed", "outputs"),
    number("arena", arena),
    Column("generations", lambda each: ", ".join(f"{name}: {count}" for name, count in each.generations.items())),
)
REPLICA_WORK = (
    number("planned", lambda each: each.planned),
    number("running", lambda each: each.load.running if each.HasField("load") else ""),
    number("queued", lambda each: each.load.queued if each.HasField("load") else ""),
    number("work left", lambda each: duration(each.load.work_s) if each.HasField("load") else ""),
    number("arena", lambda each: arena(each.load)),
)
REPLICAS = (
    Column("replica", lambda each: each.name),
    *fields("stage", "endpoint"),
    Column("state", replica_state),
    *REPLICA_WORK,
    number("memory free", lambda each: size(each.load.free_memory_bytes) if each.HasField("load") else ""),
    Column("generation", lambda each: each.generation),
)
REPLICA_STATES = (
    Column("replica", lambda each: each.name),
    Column("stage", lambda each: each.stage),
    Column("state", replica_state),
    number("planned", lambda each: each.planned),
)
EDGES = (
    Column("edge", lambda each: each.edge.name),
    Column("connector", lambda each: connector_name(each.edge.connector)),
    number("chunks", lambda each: each.chunks),
    number("bytes", lambda each: size(each.size_bytes)),
)
REQUESTS = (
    Column("request", lambda each: each.request_id),
    Column("state", request_state),
    number("duration", lambda each: duration(each.age_s)),
    number("left", lambda each: duration(each.remaining_s) if each.remaining_s else ""),
    number("outputs", lambda each: each.output_parts),
    number("kept", lambda each: size(each.size_bytes)),
    number("priority", lambda each: each.priority),
    Column("at work", lambda each: each.error.message if each.HasField("error") else ", ".join(each.running_stages)),
)


def scaling_signals(stages: "Collection[admin_pb2.StageStatus]") -> list[Column]:
    """Returns the columns of the scaling signals that at least one of the stages has."""
    return [column for name, column in _SCALING_SIGNALS.items() if any(getattr(stage, name) for stage in stages)]


def pipelines_view(pipelines: "Sequence[admin_pb2.PipelineStatus]") -> "RenderableType":
    """Returns the table of pipelines, followed by a table of callers for each pipeline that has callers."""
    from rich.console import Group

    parts: list[RenderableType] = [make_table(PIPELINES, pipelines)]
    for each in pipelines:
        if each.callers:
            parts += ["", make_table(CALLERS, each.callers)]
    return Group(*parts)


def edges_view(edges: "Sequence[admin_pb2.EdgeStatus]") -> "RenderableType":
    """Returns a table of the edges with their transferred chunks and bytes, and a table of the edges' connectors."""
    from rich.console import Group

    if not edges:
        return "the pipeline has no edges"
    return Group(make_table(EDGES, edges), "", links_table(each.edge for each in edges))


class Moment(NamedTuple):
    """One entry of a request's timeline.

    `at_s` is the time of the event in seconds since the request was received. `source` is the name of a replica, or ""
    for the orchestrator.
    """

    at_s: float
    source: str
    event: str


def request_view(answer: "admin_pb2.GetRequestResponse") -> "RenderableType":
    """Returns a display of a request: its summary, its steps, its flows and its timeline."""
    from rich.console import Group

    parts: list[RenderableType] = [_summary(answer.request), "", make_table(_STEPS, answer.steps)]
    if answer.flows:
        parts += ["", make_table(_FLOWS, answer.flows)]
    return Group(*parts, "", make_table(_TIMELINE, moments(answer)))


def moments(answer: "admin_pb2.GetRequestResponse") -> list[Moment]:
    """Returns the timeline of a request, earliest entry first."""
    timeline = [Moment(0.0, "", "received")]
    if answer.HasField("planned_s"):
        timeline.append(Moment(answer.planned_s, "", "admitted and planned"))
    for step in answer.steps:
        timeline.extend(_step_moments(step))
    return sorted(timeline, key=lambda moment: moment.at_s)


def _summary(request: "admin_pb2.RequestStatus") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    received = datetime.fromtimestamp(request.received_at_s).astimezone().isoformat(sep=" ", timespec="seconds")
    left = f", {duration(request.remaining_s)} until its deadline" if request.remaining_s else ""
    lines = [
        Text.assemble((request.request_id, "bold"), "  ", to_text(request_state(request))),
        Text(
            f"received {received}, age {duration(request.age_s)}{left}; priority {request.priority}; "
            f"outputs {', '.join(request.outputs)}: {request.output_parts:,} messages, {size(request.size_bytes)}"
            + (f"; {request.choices} choices" if request.choices > 1 else "")
        ),
    ]
    if request.HasField("error"):
        lines.append(Text(request.error.message, "red"))
    return Group(*lines)


def _of_choice(text: str, index: int) -> str:
    return f"{text}, choice {index}" if index else text


def _step_count(step: Any) -> str:
    return f"{step.engine_steps:,}" + (f" of {step.total_engine_steps}" if step.HasField("total_engine_steps") else "")


def _step_state(step: Any) -> Cell:
    if step.error.reason == _MOVED:
        return [("moved to another replica", "dim")]
    if step.HasField("error"):
        return [(f"failed: {step.error.message}", "red")]
    if step.HasField("ended_s"):
        return [("finished" if step.HasField("finished") else "ended", "dim")]
    return [(f"waits for {step.waits_for}", "yellow") if step.waits_for else ("computes", "green")]


_STEPS = (
    Column("stage", lambda step: _of_choice(step.stage, step.index)),
    Column("replica", lambda step: step.replica),
    number("attempt", lambda step: attempt_text(step.attempt)),
    number("outputs", lambda step: step.outputs),
    number("steps", _step_count),
    number("last report", lambda step: f"at {duration(step.last_event_s)}" if step.HasField("last_event_s") else ""),
    Column("state", _step_state),
)


def _newest(flow: Any) -> "control_pb2.FlowReport":
    """Returns the producer's report about a flow, or the consumer's report if the producer has not reported."""
    report: control_pb2.FlowReport = flow.sent if flow.HasField("sent") else flow.received
    return report


def _waiting(flow: Any, end: str) -> str:
    if not flow.HasField(end):
        return ""
    report: control_pb2.FlowReport = getattr(flow, end)
    return f"{report.waiting_chunks:,} ({size(report.waiting_bytes)})" if report.waiting_chunks else "0"


_FLOWS = (
    Column("edge", lambda flow: _of_choice(flow.edge, flow.index)),
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
_TIMELINE = (number("time", lambda moment: duration(moment.at_s)), *fields("source", "event"))


def attempt_text(attempt: int) -> str:
    """Returns the number of an attempt, with the number of the client's call unless it is the first.

    A client calls again after a broken connection, and at another orchestrator.
    """
    from stagemesh.common.requests.request_checks import ATTEMPTS_A_CALL

    call, number = divmod(attempt - 1, ATTEMPTS_A_CALL)
    return f"{number + 1} of call {call + 1}" if call else str(number + 1)


def _step_moments(step: "admin_pb2.StepStatus") -> Iterator[Moment]:
    attempt = "" if step.attempt == 1 else f" (attempt {attempt_text(step.attempt)})"
    source = _of_choice(f"{step.replica}{attempt}", step.index)
    if step.HasField("sent_s"):
        yield Moment(step.sent_s, source, "was sent the step")
    if step.HasField("accepted_s"):
        queued = f", {step.queue_position} before it in the queue" if step.queue_position else ""
        resumed = (
            f" and resumes after engine step {step.resumed_engine_steps:,}"
            if step.HasField("resumed_engine_steps")
            else ""
        )
        yield Moment(step.accepted_s, source, f"accepted the step{resumed}{queued}")
    for each in step.rebindings:
        yield Moment(each.at_s, source, f"was connected to another replica on {' and '.join(each.edges)}")
    if step.HasField("first_output_s"):
        yield Moment(step.first_output_s, source, "sent its first output")
    if step.HasField("ended_s"):
        yield Moment(step.ended_s, source, _ending(step))
    elif step.HasField("last_event_s") and step.outputs + step.engine_steps:
        yield Moment(
            step.last_event_s, source, f"last report: {step.outputs:,} outputs, {step.engine_steps:,} engine steps"
        )


def _ending(step: "admin_pb2.StepStatus") -> str:
    if step.error.reason == _MOVED:
        return "released the step for another replica, because it is drained"
    if step.HasField("error"):
        return f"failed: {step.error.message}"
    if not step.HasField("finished"):
        return "ended"
    sent = "".join(
        f"; sent {edge.chunks:,} chunks ({size(edge.size_bytes)}) on {edge.edge} by {connector_name(edge.connector)}"
        for edge in step.finished.edges
    )
    return f"finished: {step.outputs:,} outputs, {step.engine_steps:,} engine steps{sent}"


Values: TypeAlias = Mapping[str, Any]
"""The values of a command's parameters, by parameter name.

The key "replica" contains the name of the replica that answers, or "" if AdminService answers.
"""
Display: TypeAlias = "Callable[[Any, Values], RenderableType]"
"""A function that returns the text or table to print, from the answer of an RPC and the command's values."""


def table_display(columns: Sequence[Column], rows: str) -> Display:
    """Returns a display that shows a repeated field of an answer as a table.

    `rows` is the name of the field. The table has one row for each item of the field.
    """
    return lambda answer, _: make_table(columns, getattr(answer, rows))


def restart_phase(answer: Any, _: Values) -> str:
    """Returns the phase of a replica's restart, with the number of requests that still run on it."""
    from stagemesh.v1 import admin_pb2

    running = f", {answer.running} requests are still running" if answer.running else ""
    return f"{answer.replica}: {enum_word(admin_pb2.RestartPhase.DESCRIPTOR, answer.phase)}{running}"


def sleep_result(answer: Any, _: Values) -> str:
    """Returns which parts of a replica are asleep, or "awake"."""
    return f"asleep: {', '.join(answer.asleep)}" if answer.asleep else "awake"


def cache_result(answer: Any, values: Values) -> str:
    """Returns the size and the hit rate of a cache, or "cleared"."""
    if values["clear"]:
        return "cleared"
    if answer.blocks:
        reused = answer.cached_tokens / answer.prompt_tokens if answer.prompt_tokens else 0.0
        return (
            f"{answer.blocks:,} blocks of {answer.block_tokens} tokens; "
            f"{reused:.0%} of {answer.prompt_tokens:,} prompt tokens were cached"
        )
    lookups = answer.hits + answer.misses
    return (
        f"{answer.entries:,} entries, {size(answer.size_bytes)} of {size(answer.limit_bytes)}; "
        f"{answer.hits / lookups if lookups else 0:.0%} of {lookups:,} lookups were hits"
    )


def adapters_text(answer: Any, _: Values) -> str:
    """Returns a line for each adapter, and one for each replica that has loaded it."""
    lines = [
        f"\n  {each.name}{'' if each.persistent else ' (not loaded on replicas that start)'}" + outcomes_text(each, _)
        for each in answer.adapters
    ]
    return f"{len(answer.adapters)} adapters{''.join(lines)}"


def outcomes_text(answer: Any, _: Values) -> str:
    """Returns a line with the outcome on each replica."""
    return "".join(f"\n  {each.replica}: {_outcome(each)}" for each in answer.replicas)


def _outcome(outcome: Any) -> str:
    adapter = outcome.adapter
    if outcome.HasField("error"):
        return f"failed: {outcome.error.message}"
    if not outcome.HasField("adapter"):
        return "unloaded"
    return f"rank {adapter.rank}{', pinned' if adapter.pinned else ''}, {adapter.running} running  {adapter.path}"


def log_levels_text(answer: Any, values: Values) -> str:
    """Returns a line with the new and the previous log level of each process."""
    from stagemesh.v1 import control_pb2

    def outcome(each: Any) -> str:
        if each.HasField("error"):
            return f"failed: {each.error.message}"
        return f"{values['level'].value}, was {enum_word(control_pb2.LogLevel.DESCRIPTOR, each.previous)}"

    return "\n".join(f"{each.process}: {outcome(each)}" for each in answer.processes)
