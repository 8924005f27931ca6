"""`stagemesh stages` and `stagemesh top`: show the current state of a running pipeline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagemesh.orchestrator.cli.admin import views
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER, DEFAULT_SERVER, AdminServer, Server, read_endpoints
from stagemesh.orchestrator.cli.output import (
    Column,
    connector_name,
    duration,
    links_table,
    make_table,
    number,
    print_all,
    print_json,
    size,
    to_json,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from stagemesh.v1 import admin_pb2, orchestrator_pb2


def stages(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """List the stages and replicas of a running pipeline, and the connectors that its edges use."""
    from stagemesh.client import Client

    with Client(*read_endpoints(server)) as client:
        pipeline = client.describe()
    if as_json:
        print_json(to_json(pipeline))
        return
    print_all(_stages_table(pipeline))
    if pipeline.edges:
        typer.echo()
        print_all(links_table(pipeline.edges))


def _stages_table(pipeline: "orchestrator_pb2.DescribePipelineResponse") -> "Table":
    from stagemesh.v1 import orchestrator_pb2

    title = (
        f"{pipeline.pipeline} {pipeline.generation}: {pipeline.in_flight} of {pipeline.max_in_flight} requests in "
        f"flight, {pipeline.queued} of {pipeline.max_queued} queued"
    )
    none = orchestrator_pb2.ReplicaStatus(name="none")
    columns = (
        Column("stage", lambda row: row[0].name),
        Column("engine", lambda row: row[0].engine),
        Column("replica", lambda row: row[1].name),
        Column("endpoint", lambda row: row[1].endpoint),
        Column("state", lambda row: views.replica_state(row[1])),
        number("planned", lambda row: row[1].planned),
    )
    rows = [(stage, replica) for stage in pipeline.stages for replica in stage.replicas or (none,)]
    return make_table(columns, rows, title=title)


def top(
    interval: Annotated[
        float,
        typer.Option(
            "--interval", "-n", min=0.2, metavar="SECONDS", help="Set the number of seconds between two updates."
        ),
    ] = 1.0,
    slowest: Annotated[int, typer.Option(min=1, help="Show at most this number of requests, the slowest first.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print one update after one interval, and exit.")] = False,
    server: AdminServer = DEFAULT_ADMIN_SERVER,
    as_json: AsJson = False,
) -> None:
    """Show the stages, replicas, edges, rates and slowest requests of a running pipeline. Refresh the display until
    Ctrl-C.
    """
    from contextlib import closing

    from stagemesh.orchestrator.cli.admin.client import AdminConnection
    from stagemesh.v1 import admin_pb2

    request = admin_pb2.WatchPipelineRequest(interval_s=interval, slowest=slowest)
    with AdminConnection(server) as admin, closing(admin.stream("WatchPipeline", request)) as snapshots:
        if as_json:
            for snapshot in snapshots:
                print_json(to_json(snapshot))
                if once:
                    return
        else:
            _show(snapshots, once=once)


def _show(snapshots: "Iterator[admin_pb2.WatchPipelineResponse]", *, once: bool) -> None:
    from itertools import pairwise

    from rich.console import Console
    from rich.live import Live

    # Each view shows the rates between two snapshots.
    views_ = (top_view(now, before) for before, now in pairwise(snapshots))
    console = Console(highlight=False)
    if once or not console.is_terminal:
        for view in views_:
            print_all(view)
            if once:
                return
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views_:
                live.update(view, refresh=True)


def top_view(now: "admin_pb2.WatchPipelineResponse", before: "admin_pb2.WatchPipelineResponse") -> "RenderableType":
    """Returns the display of the snapshot `now`, with the rates per second since the snapshot `before`."""
    from rich.console import Group
    from rich.text import Text

    seconds = max(1e-9, now.clock_s - before.clock_s)
    parts: list[RenderableType] = [
        _summary(now.pipeline, before.pipeline, seconds),
        "",
        make_table(_stage_columns(seconds), _pairs(now.stages, before.stages, lambda stage: stage.name)),
        "",
        make_table(_REPLICAS, now.replicas),
    ]
    if now.edges:
        parts += ["", make_table(_edge_columns(seconds), _pairs(now.edges, before.edges, lambda each: each.edge.name))]
    slowest = make_table(views.REQUESTS, now.slowest) if now.slowest else Text("no request is queued or running", "dim")
    return Group(*parts, "", slowest)


def _summary(now: "admin_pb2.PipelineStatus", before: "admin_pb2.PipelineStatus", seconds: float) -> "Text":
    from rich.text import Text

    failed = f", {now.failed} failed" if now.failed else ""
    cancelled = f", {now.cancelled} cancelled" if now.cancelled else ""
    return Text.assemble(
        (f"{now.name} {now.generation}", "bold"),
        "  ",
        ("ready", "green") if now.ready else ("not ready", "red"),
        f"  up {duration(now.uptime_s)}\n",
        f"{now.in_flight} of {now.max_in_flight} requests in flight, {now.queued} queued; "
        f"{_rate((now.finished - before.finished) / seconds)} finish per second; "
        f"{now.finished:,} finished{failed}{cancelled}",
    )


def _pairs(now: Iterable[Any], before: Iterable[Any], name: Callable[[Any], str]) -> list[tuple[Any, Any]]:
    """Pairs each item of `now` with the item of `before` that has the same name.

    Pairs an item with itself if `before` contains no item of this name. `name` returns the name of an item.
    """
    earlier = {name(item): item for item in before}
    return [(item, earlier.get(name(item), item)) for item in now]


def _rate_column(title: str, field: str, seconds: float, show: Callable[[float], str]) -> Column:
    return number(title, lambda pair: show((getattr(pair[0], field) - getattr(pair[1], field)) / seconds))


def _current(column: Column) -> Column:
    return number(column.title, lambda pair: column.cell(pair[0]))


def _stage_columns(seconds: float) -> Sequence[Column]:
    return (
        Column("stage", lambda pair: pair[0].name),
        *(_current(column) for column in views.STAGE_WORK),
        _rate_column("outputs/s", "outputs", seconds, _rate),
        _rate_column("steps/s", "steps", seconds, _rate),
        _rate_column("done/s", "finished", seconds, _rate),
        number("failed", lambda pair: pair[0].failed),
        number("arena", lambda pair: views.arena(pair[0])),
        number("credit", lambda pair: size(pair[0].credit_bytes)),
    )


_REPLICAS = (
    Column("replica", lambda each: each.name),
    Column("state", views.replica_state),
    *views.REPLICA_WORK,
    number("credit", lambda each: size(each.load.credit_bytes) if each.HasField("load") else ""),
)


def _edge_columns(seconds: float) -> Sequence[Column]:
    return (
        Column("edge", lambda pair: pair[0].edge.name),
        Column("by", lambda pair: _connectors(pair[0])),
        _rate_column("chunks/s", "chunks", seconds, _rate),
        _rate_column("bytes/s", "size_bytes", seconds, size),
        number("chunks", lambda pair: pair[0].chunks),
    )


def _connectors(edge: "admin_pb2.EdgeStatus") -> str:
    used = sorted({connector_name(link.connector) for link in edge.edge.links})
    return ", ".join(used) or "none are ready"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if not per_s or per_s >= 100 else f"{per_s:.1f}"
