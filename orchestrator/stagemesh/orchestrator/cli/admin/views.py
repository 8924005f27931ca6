"""Tables for the lists of AdminService: pipelines, callers, stages, replicas, edges and requests."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagemesh.orchestrator.cli.output import (
    Cell,
    Column,
    connector_name,
    duration,
    enum_word,
    links_table,
    make_table,
    number,
    size,
    state_cell,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stagemesh.v1 import admin_pb2


def request_state(request: Any) -> Cell:
    """Returns a table cell with the state of a request, in the color of the state."""
    from stagemesh.v1 import admin_pb2

    return state_cell(enum_word(admin_pb2.RequestState.DESCRIPTOR, request.state))


def replica_state(replica: Any) -> Cell:
    """Returns a table cell with the state of a replica in the color of the state, followed by its detail."""
    from stagemesh.v1 import stage_pb2

    return state_cell(enum_word(stage_pb2.ReplicaState.DESCRIPTOR, replica.state), replica.detail)


def ready_replicas(stage: Any) -> Cell:
    """Returns a table cell with the numbers of ready replicas and of all replicas of a stage, such as "1 of 2"."""
    style = "green" if stage.ready == stage.replicas and stage.ready else "yellow" if stage.ready else "red"
    return [(f"{stage.ready} of {stage.replicas}", style)]


def arena(load: Any) -> str:
    """Returns the used percentage and the size of an arena, such as "40% of 67.1 MB", or "" if the size is unknown."""
    if not load.arena_size_bytes:
        return ""
    return f"{load.arena_used_bytes / load.arena_size_bytes:.0%} of {size(load.arena_size_bytes)}"


PIPELINES = (
    Column("pipeline", lambda each: each.name),
    Column("generation", lambda each: each.generation),
    Column("state", lambda each: [("ready", "green") if each.ready else ("not ready", "red")]),
    number("in flight", lambda each: f"{each.in_flight} of {each.max_in_flight}"),
    number("queued", lambda each: each.queued),
    number("finished", lambda each: each.finished),
    number("failed", lambda each: each.failed),
    number("cancelled", lambda each: each.cancelled),
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
    number("running", lambda each: each.running),
    number("queued", lambda each: each.queued),
    number("work left", lambda each: duration(each.work_s)),
)
STAGES = (
    Column("stage", lambda each: each.name),
    Column("engine", lambda each: each.engine),
    Column("model", lambda each: each.model),
    *STAGE_WORK,
    number("finished", lambda each: each.finished),
    number("failed", lambda each: each.failed),
    number("outputs", lambda each: each.outputs),
    number("arena", arena),
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
    Column("stage", lambda each: each.stage),
    Column("endpoint", lambda each: each.endpoint),
    Column("state", replica_state),
    *REPLICA_WORK,
    number("memory free", lambda each: size(each.load.free_memory_bytes) if each.HasField("load") else ""),
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
    number("age", lambda each: duration(each.age_s)),
    number("left", lambda each: duration(each.left_s) if each.left_s else ""),
    number("outputs", lambda each: each.pieces),
    number("kept", lambda each: size(each.size_bytes)),
    number("priority", lambda each: each.priority),
    Column("at work", lambda each: each.error.message if each.HasField("error") else ", ".join(each.at_work)),
)


def pipelines_view(pipelines: "Sequence[admin_pb2.PipelineStatus]") -> "RenderableType":
    """Returns the table of pipelines, followed by a table of callers for each pipeline that has any."""
    from rich.console import Group

    parts: list[RenderableType] = [make_table(PIPELINES, pipelines)]
    for each in pipelines:
        if each.callers:
            parts += ["", make_table(CALLERS, each.callers)]
    return Group(*parts)


def edges_view(edges: "Sequence[admin_pb2.EdgeStatus]") -> "RenderableType":
    """Returns a table of the edges with their transferred chunks and bytes, followed by a table of connectors."""
    from rich.console import Group

    if not edges:
        return "the pipeline has no edges"
    return Group(make_table(EDGES, edges), "", links_table(each.edge for each in edges))
