"""`stagemesh top`: shows the current state of a running pipeline."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from stagemesh.cli.operation import views
from stagemesh.cli.terminal.connection_options import ADMIN_SERVER
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameters, flag, option, with_parameters
from stagemesh.cli.terminal.output import (
    INTERVAL,
    connector_name,
    duration,
    print_all,
    print_json,
    show_views,
    size,
    to_json,
)
from stagemesh.cli.terminal.tables import Column, make_table, number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from stagemesh.v1 import admin_pb2


_TOP: Parameters = {
    "interval": INTERVAL,
    "slowest": option(int, "Show at most this number of requests, the slowest first.", default=10, min=1),
    "once": flag("Print one update after one interval, and exit.", "--once"),
    **ADMIN_SERVER,
    **AS_JSON,
}


@with_parameters(_TOP)
def top(**values: Any) -> None:
    """Show the stages, replicas, edges, rates and slowest requests of a running pipeline. Refresh the display until
    Ctrl-C.
    """
    from stagemesh.cli.operation.admin_connection import AdminConnection

    last = 1 if values["once"] else None
    request = {"interval_s": values["interval"], "slowest": values["slowest"]}
    with AdminConnection(values["admin_server"]) as admin, closing(admin.stream("WatchPipeline", request)) as snapshots:
        if values["as_json"]:
            for snapshot in islice(snapshots, last):
                print_json(to_json(snapshot))
            return
        # Each view shows the rates between two snapshots.
        shown = (top_view(now, before) for before, now in pairwise(snapshots))
        if values["once"]:
            print_all(next(shown))
        else:
            show_views(shown)


def top_view(now: "admin_pb2.WatchPipelineResponse", before: "admin_pb2.WatchPipelineResponse") -> "RenderableType":
    """Returns the display of the snapshot `now`, with the rates per second since the snapshot `before`."""
    from rich.console import Group
    from rich.text import Text

    seconds = max(1e-9, now.clock_s - before.clock_s)
    parts: list[RenderableType] = [
        _summary(now.pipeline, before.pipeline, seconds),
        "",
        make_table(_stage_columns(now, seconds), _pairs(now.stages, before.stages, lambda stage: stage.name)),
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


def _stage_columns(now: "admin_pb2.WatchPipelineResponse", seconds: float) -> Sequence[Column]:
    return (
        Column("stage", lambda pair: pair[0].name),
        *(_current(column) for column in (*views.STAGE_WORK, *views.scaling_signals(now.stages))),
        _rate_column("outputs/s", "outputs", seconds, _rate),
        _rate_column("steps/s", "engine_steps", seconds, _rate),
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
        number("chunks/s", lambda pair: _rate(_sent(pair, "chunks", seconds))),
        number("bytes/s", lambda pair: size(_sent(pair, "size_bytes", seconds))),
        number("chunks", lambda pair: max(pair[0].chunks, pair[0].sent.chunks)),
    )


def _sent(pair: "tuple[admin_pb2.EdgeStatus, admin_pb2.EdgeStatus]", field: str, seconds: float) -> float:
    """Returns how much an edge has carried a second. Counts chunks of running requests if the stage counts them."""
    now, before = (float(getattr(each.sent if pair[0].HasField("sent") else each, field)) for each in pair)
    return max(0.0, (now - before) / seconds)


def _connectors(edge: "admin_pb2.EdgeStatus") -> str:
    from stagemesh.common.plugins.descriptors import INPUT

    if edge.edge.from_stage == INPUT:
        return connector_name(edge.edge.connector)
    used = sorted({connector_name(link.connector) for link in edge.edge.links})
    return ", ".join(used) or "none are ready"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if not per_s or per_s >= 100 else f"{per_s:.1f}"
