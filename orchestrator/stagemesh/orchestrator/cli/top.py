"""`stagemesh top`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER, AdminServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from stagemesh.v1 import admin_pb2


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.2, metavar="SECONDS", help="Between views.")
    ] = 1.0,
    slowest: Annotated[int, typer.Option(min=1, help="How many of the slowest requests.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Show one view, of one interval, and end.")] = False,
    server: AdminServer = DEFAULT_ADMIN_SERVER,
    as_json: AsJson = False,
) -> None:
    """Shows stages, queues, credit, rates and the slowest requests, as they change, until Ctrl-C."""
    from contextlib import closing

    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.v1 import admin_pb2

    request = admin_pb2.WatchPipelineRequest(interval_s=interval, slowest=slowest)
    with connected(server) as admin:
        snapshots = admin.stream(admin.admin.WatchPipeline, request)
        with closing(snapshots):
            if as_json:
                _write_json(snapshots, once=once)
            else:
                _show(snapshots, once=once)


def _write_json(snapshots: "Iterator[admin_pb2.WatchPipelineResponse]", *, once: bool) -> None:
    from stagemesh.orchestrator.cli.admin.output import show_json

    for snapshot in snapshots:
        show_json(snapshot)
        sys.stdout.flush()
        if once:
            return


def _show(snapshots: "Iterator[admin_pb2.WatchPipelineResponse]", *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from stagemesh.orchestrator.cli.tables import print_whole

    views = _views(snapshots)
    console = Console(highlight=False)
    if once or not console.is_terminal:
        for view in views:
            print_whole(view)
            if once:
                return
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(view, refresh=True)


def _views(snapshots: "Iterator[admin_pb2.WatchPipelineResponse]") -> "Iterator[RenderableType]":
    """A view for every two snapshots: rates are what happened between them."""
    from stagemesh.orchestrator.cli.top_view import top_view

    former = None
    for snapshot in snapshots:
        if former is not None:
            yield top_view(snapshot, former)
        former = snapshot
