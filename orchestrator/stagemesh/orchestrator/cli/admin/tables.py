"""Tables of what AdminService lists."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stagemesh.client.descriptions import EdgeInfo, decode_edge
from stagemesh.orchestrator.cli.admin.formatting import duration, size
from stagemesh.orchestrator.cli.admin.json_output import word_of
from stagemesh.orchestrator.cli.admin.output import make_table
from stagemesh.orchestrator.cli.tables import links_table, styled_state
from stagemesh.v1 import admin_pb2, stage_pb2

_REQUEST_STYLES = {"queued": "cyan", "running": "green", "finished": "dim", "failed": "red", "cancelled": "yellow"}
_REPLICA_STATES = stage_pb2.DESCRIPTOR.enum_types_by_name["ReplicaState"]
_REQUEST_STATES = admin_pb2.DESCRIPTOR.enum_types_by_name["RequestState"]


def pipelines_table(pipelines: Iterable[admin_pb2.PipelineStatus]) -> Table:
    """Pipelines with what became of their requests."""
    figures = ("in flight", "queued", "finished", "failed", "cancelled")
    table = make_table("pipeline", "generation", "state", *figures, "up", right=(*figures, "up"))
    for each in pipelines:
        table.add_row(
            each.name,
            each.generation,
            Text("ready", "green") if each.ready else Text("not ready", "red"),
            f"{each.in_flight} of {each.max_in_flight}",
            str(each.queued),
            str(each.finished),
            str(each.failed),
            str(each.cancelled),
            duration(each.uptime_s),
        )
    return table


def pipelines_view(pipelines: Sequence[admin_pb2.PipelineStatus]) -> RenderableType:
    """Pipelines, and who has requests there."""
    parts: list[RenderableType] = [pipelines_table(pipelines)]
    for each in pipelines:
        if each.callers:
            parts += ["", callers_table(each)]
    return Group(*parts)


def callers_table(pipeline: admin_pb2.PipelineStatus) -> Table:
    """What each caller has that runs and waits."""
    figures = ("in flight", "bytes", "queued", "queued bytes")
    table = make_table("caller", *figures, right=figures)
    for each in pipeline.callers:
        table.add_row(
            Text(each.caller) if each.caller else Text("without a name", "dim"),
            str(each.in_flight),
            size(each.in_flight_bytes),
            str(each.queued),
            size(each.queued_bytes),
        )
    return table


def stages_table(stages: Iterable[admin_pb2.StageStatus]) -> Table:
    """Stages with their work."""
    figures = ("ready", "running", "queued", "work left", "finished", "failed", "outputs", "arena")
    table = make_table("stage", "engine", "model", *figures, right=figures)
    for each in stages:
        table.add_row(
            each.name,
            each.engine,
            each.model,
            _ready(each),
            str(each.running),
            str(each.queued),
            duration(each.work_s),
            str(each.finished),
            str(each.failed),
            f"{each.outputs:,}",
            _share(each.arena_used_bytes, each.arena_size_bytes),
        )
    return table


def replicas_table(replicas: Iterable[admin_pb2.ReplicaStatus]) -> Table:
    """Replicas with their load."""
    figures = ("planned", "running", "queued", "work left", "arena", "memory free")
    table = make_table("replica", "stage", "endpoint", "state", *figures, right=figures)
    for each in replicas:
        load = each.load
        known = each.HasField("load")
        table.add_row(
            each.name,
            each.stage,
            each.endpoint,
            styled_state(word_of(_REPLICA_STATES, each.state), each.detail),
            str(each.planned),
            str(load.running) if known else "",
            str(load.queued) if known else "",
            duration(load.work_s) if known else "",
            _share(load.arena_used_bytes, load.arena_size_bytes) if known else "",
            size(load.free_memory_bytes) if known else "",
        )
    return table


def replicas_states(replicas: Iterable[admin_pb2.ReplicaStatus]) -> Table:
    """Replicas and where they stand, no more."""
    table = make_table("replica", "stage", "state", "planned", right=("planned",))
    for each in replicas:
        state = styled_state(word_of(_REPLICA_STATES, each.state), each.detail)
        table.add_row(each.name, each.stage, state, str(each.planned))
    return table


def edges_view(edges: Sequence[admin_pb2.EdgeStatus]) -> RenderableType:
    """Edges with what they have carried, and what their links use."""
    carried = make_table("edge", "asked for", "chunks", "bytes", right=("chunks", "bytes"))
    described: list[EdgeInfo] = []
    for each in edges:
        edge = decode_edge(each.edge)
        described.append(edge)
        carried.add_row(Text(edge.name), edge.connector, f"{each.chunks:,}", size(each.size_bytes))
    return Group(carried, "", links_table(described)) if described else "there are no edges"


def requests_table(requests: Iterable[admin_pb2.RequestStatus], *, title: str | None = None) -> Table:
    """Requests, how old they are, and what is at work for them."""
    figures = ("age", "left", "pieces", "kept")
    table = make_table("request", "state", *figures, "priority", "at work", right=(*figures, "priority"), title=title)
    for each in requests:
        table.add_row(
            each.request_id,
            request_state(each.state),
            duration(each.age_s),
            duration(each.left_s) if each.left_s else "",
            f"{each.pieces:,}",
            size(each.size_bytes),
            str(each.priority),
            Text(each.error.message if each.HasField("error") else ", ".join(each.at_work)),
        )
    return table


def request_state(state: "admin_pb2.RequestState.ValueType") -> Text:
    """A request's state in its colour."""
    word = word_of(_REQUEST_STATES, state)
    return Text(word, _REQUEST_STYLES.get(word, ""))


def _ready(stage: admin_pb2.StageStatus) -> Text:
    style = "green" if stage.ready == stage.replicas and stage.ready else "yellow" if stage.ready else "red"
    return Text(f"{stage.ready} of {stage.replicas}", style)


def _share(used_bytes: int, size_bytes: int) -> str:
    return f"{used_bytes / size_bytes:.0%} of {size(size_bytes)}" if size_bytes else ""
