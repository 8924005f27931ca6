"""What `stagemesh top` shows."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stagemesh.orchestrator.cli.admin.formatting import duration, rate, size
from stagemesh.orchestrator.cli.admin.json_output import word_of
from stagemesh.orchestrator.cli.admin.output import make_table
from stagemesh.orchestrator.cli.admin.tables import requests_table
from stagemesh.orchestrator.cli.tables import styled_state
from stagemesh.v1 import admin_pb2, chunk_pb2, stage_pb2

Snapshot = admin_pb2.WatchPipelineResponse

_CONNECTORS = chunk_pb2.DESCRIPTOR.enum_types_by_name["Connector"]
_STATES = stage_pb2.DESCRIPTOR.enum_types_by_name["ReplicaState"]


def top_view(now: Snapshot, before: Snapshot) -> RenderableType:
    """The pipeline now, with rates since the snapshot before."""
    seconds = max(1e-9, now.clock_s - before.clock_s)
    parts: list[RenderableType] = [
        _head(now, before, seconds),
        "",
        _stages(now, before, seconds),
        "",
        _replicas(now),
    ]
    if now.edges:
        parts += ["", _edges(now, before, seconds)]
    slowest = requests_table(now.slowest) if now.slowest else Text("no request waits or runs", "dim")
    return Group(*parts, "", slowest)


def _head(now: Snapshot, before: Snapshot, seconds: float) -> Text:
    pipeline = now.pipeline
    ended = pipeline.finished - before.pipeline.finished
    failed = f", {pipeline.failed} failed" if pipeline.failed else ""
    cancelled = f", {pipeline.cancelled} cancelled" if pipeline.cancelled else ""
    return Text.assemble(
        (f"{pipeline.name} {pipeline.generation}", "bold"),
        "  ",
        ("ready", "green") if pipeline.ready else ("not ready", "red"),
        f"  up {duration(pipeline.uptime_s)}\n",
        f"{pipeline.in_flight} of {pipeline.max_in_flight} requests in flight, {pipeline.queued} queued; "
        f"{rate(ended / seconds)} finish a second; {pipeline.finished:,} finished{failed}{cancelled}",
    )


def _stages(now: Snapshot, before: Snapshot, seconds: float) -> Table:
    figures = ("ready", "running", "queued", "work left", "outputs/s", "steps/s", "done/s", "failed", "arena", "credit")
    table = make_table("stage", *figures, right=figures)
    former = {stage.name: stage for stage in before.stages}
    for stage in now.stages:
        was = former.get(stage.name, stage)
        style = "green" if stage.ready == stage.replicas and stage.ready else "yellow" if stage.ready else "red"
        table.add_row(
            stage.name,
            Text(f"{stage.ready} of {stage.replicas}", style),
            str(stage.running),
            str(stage.queued),
            duration(stage.work_s),
            rate((stage.outputs - was.outputs) / seconds),
            rate((stage.steps - was.steps) / seconds),
            rate((stage.finished - was.finished) / seconds),
            str(stage.failed),
            f"{stage.arena_used_bytes / stage.arena_size_bytes:.0%}" if stage.arena_size_bytes else "",
            size(stage.credit_bytes),
        )
    return table


def _replicas(now: Snapshot) -> Table:
    figures = ("planned", "running", "queued", "work left", "arena", "credit")
    table = make_table("replica", "state", *figures, right=figures)
    for replica in now.replicas:
        load = replica.load
        known = replica.HasField("load")
        table.add_row(
            replica.name,
            styled_state(word_of(_STATES, replica.state), replica.detail),
            str(replica.planned),
            str(load.running) if known else "",
            str(load.queued) if known else "",
            duration(load.work_s) if known else "",
            f"{load.arena_used_bytes / load.arena_size_bytes:.0%}" if load.arena_size_bytes else "",
            size(load.credit_bytes) if known else "",
        )
    return table


def _edges(now: Snapshot, before: Snapshot, seconds: float) -> Table:
    figures = ("chunks/s", "bytes/s", "chunks")
    table = make_table("edge", "by", *figures, right=figures)
    former = {edge.edge.name: edge for edge in before.edges}
    for edge in now.edges:
        was = former.get(edge.edge.name, edge)
        table.add_row(
            Text(edge.edge.name),
            _connectors(edge),
            rate((edge.chunks - was.chunks) / seconds),
            size((edge.size_bytes - was.size_bytes) / seconds),
            f"{edge.chunks:,}",
        )
    return table


def _connectors(edge: admin_pb2.EdgeStatus) -> str:
    used = sorted({word_of(_CONNECTORS, link.connector) or "not known" for link in edge.edge.links})
    return ", ".join(used) or "none are ready"
