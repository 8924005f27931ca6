"""The output of commands: results as text or JSON, files, and views that are refreshed until Ctrl-C."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.terminal.options import Kind, Parameters, flag, option
from stagemesh.cli.terminal.tables import Cell, Column, make_table

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.v1 import orchestrator_pb2

_PIPE_COLUMNS = 240
_MINUTE_S = 60


def print_all(output: "RenderableType") -> None:
    """Prints text or tables to stdout.

    The output is as wide as the terminal, or 240 columns wide if stdout is not a terminal.
    """
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(output)


def to_json(message: "Message") -> dict[str, Any]:
    """Converts a protobuf message to a JSON object with the field names of the .proto files.

    Scalars and lists that are not set are included with their defaults. Messages and optional fields that are not set
    are omitted.
    """
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_json(document: object) -> None:
    """Prints a value as one line of JSON, and flushes stdout."""
    typer.echo(json.dumps(document, ensure_ascii=False))
    sys.stdout.flush()


def print_result(document: object, view: "RenderableType", *, as_json: bool) -> None:
    """Prints the result of a command to stdout: `document` as JSON, or else the text or table `view`."""
    if as_json:
        print_json(document)
    elif isinstance(view, str):
        typer.echo(view)
    else:
        print_all(view)


def size(size_bytes: float) -> str:
    """Formats a number of bytes in decimal units, for example "17 bytes" or "1.5 MB"."""
    from rich.filesize import decimal

    return decimal(int(size_bytes))


def duration(seconds: float) -> str:
    """Formats a number of seconds as text, for example "12 ms", "3.20 s", "0:04:05" or "3 days, 4:00:00"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < _MINUTE_S else str(timedelta(seconds=round(seconds)))


def connector_name(connector: int) -> str:
    """Returns the name of the connector with this number in the protobuf enum `Connector`.

    Returns "not known" for 0, which means that no replica has reported a connector.
    """
    from stagemesh.common.plugins.connectors import shown_name

    return shown_name(connector) if connector else "not known"


def links_table(edges: "Iterable[orchestrator_pb2.EdgeDescription]") -> "Table":
    """Returns a table of the connectors that edges use, with the reasons why preferred connectors cannot be used.

    Pairs of replicas with the same connector and the same reasons share a row.
    """
    columns = [Column(title, itemgetter(index)) for index, title in enumerate(("edge", "replicas", "connector"))]
    return make_table(columns, [row for edge in edges for row in _link_rows(edge)])


def _link_rows(edge: "orchestrator_pb2.EdgeDescription") -> list[tuple[str, str, Cell]]:
    from stagemesh.common.plugins.descriptors import INPUT

    if edge.from_stage == INPUT:
        return [(edge.name, "from the orchestrator", connector_name(edge.connector))]
    pairs: dict[tuple[str, str], list[str]] = {}
    for link in edge.links:
        key = (connector_name(link.connector), _link_reasons(link))
        pairs.setdefault(key, []).append(f"{link.producer} to {link.consumer}")
    rows: list[tuple[str, str, Cell]] = []
    for (connector, reasons), names in pairs.items():
        replicas = "all" if len(pairs) == 1 and len(names) > 1 else ", ".join(names)
        rows.append((edge.name, replicas, [(connector, ""), (reasons, "dim")]))
    return rows or [(edge.name, "none are ready", f"the pipeline file sets {connector_name(edge.connector)}")]


def _link_reasons(link: "orchestrator_pb2.EdgeLink") -> str:
    reasons = [f"{connector_name(each.connector)}: {each.error.message}" for each in link.refusals]
    reasons = reasons or [link.error.message] * link.HasField("error")
    return f"  ({'; '.join(reasons)})" if reasons else ""


INTERVAL = option(
    Kind.SECONDS, "Set the number of seconds between two updates.", "--interval", "-n", default=1.0, min=0.2
)
WATCH: Parameters = {
    "watch": flag("Refresh the list until Ctrl-C. With --json, print one document per update.", "--watch"),
    "interval": INTERVAL,
}


def ticks(*, interval_s: float, watch: bool) -> Iterator[None]:
    """Yields at once, and then every `interval_s` seconds if `watch` is True."""
    yield
    while watch:
        time.sleep(interval_s)
        yield


def show_views(views: "Iterable[RenderableType]") -> None:
    """Displays each view in the place of the previous one.

    If stdout is not a terminal, prints the views one after the other.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for view in views:
            print_all(view)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for view in views:
            live.update(view, refresh=True)
