"""`stagemesh trace`: draws the timeline of a request, and writes it for Perfetto."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagemesh.cli.operation.admin_targets import complete_request
from stagemesh.cli.terminal.connection_options import ADMIN_SERVER
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, argument, option, with_parameters
from stagemesh.cli.terminal.output import duration, print_result
from stagemesh.cli.terminal.tables import Column, make_table, number
from stagemesh.common.errors import writing

if TYPE_CHECKING:
    from rich.table import Table

    from stagemesh.orchestrator.spans import Span

_BAR_CELLS = 60
_US = 1e6

_TRACE: Parameters = {
    "request_id": argument(Kind.ID, "Select the request with this id.", complete=complete_request),
    "output": option(
        str,
        "Write the spans to this file, in the JSON format of traces that Perfetto (ui.perfetto.dev) and browsers show.",
        "-o",
        "--output",
        metavar="FILE",
    ),
    "expand": option(
        bool, "Draw each chunk and each call of an engine in a line of its own.", "--expand", default=False
    ),
    **ADMIN_SERVER,
    **AS_JSON,
}


@with_parameters(_TRACE)
def trace(**values: Any) -> None:
    """Draw the timeline of a request: when it waited, and when each attempt of each stage worked. Requests that have
    ended are known for a limited time.
    """
    from stagemesh.cli.operation.admin_connection import AdminConnection
    from stagemesh.orchestrator.spans import request_spans

    with AdminConnection(values["admin_server"]) as admin:
        spans = request_spans(admin.call("GetRequest", values))
    if values["output"]:
        _write(Path(values["output"]), spans)
    view = _view([[span] for span in spans] if values["expand"] else _groups(spans))
    print_result([_fields(span) for span in spans], view, as_json=values["as_json"])


def _groups(spans: "Sequence[Span]") -> "list[list[Span]]":
    """Returns the spans in groups. The chunks of an edge form a group, and so do the calls of an attempt. Each other
    span is a group of its own.
    """
    groups: dict[object, list[Span]] = {}
    for span in spans:
        groups.setdefault((span.path[:-1], span.name) if span.is_repeated else span.path, []).append(span)
    return list(groups.values())


def _fields(span: "Span") -> dict[str, object]:
    return {
        **{name: getattr(span, name) for name in ("name", "process", "start_s", "end_s", "error")},
        "depth": len(span.path) - 1,
        "attributes": dict(span.attributes),
    }


def _view(groups: "Sequence[Sequence[Span]]") -> "Table":
    """Returns a table with a line for each group of spans."""
    total_s = max(span.end_s for group in groups for span in group) or 1.0
    columns = [
        Column("span", lambda group: [("  " * (len(group[0].path) - 1) + _name(group), _style(group[0]))]),
        Column("process", lambda group: [(group[0].process, _style(group[0]))]),
        number("from", lambda group: duration(group[0].start_s)),
        number("for", lambda group: duration(sum(span.end_s - span.start_s for span in group))),
        Column(f"0 to {duration(total_s)}", lambda group: [(_bar(group, total_s), _style(group[0]) or "cyan")]),
        Column("error", lambda group: [(group[0].error, "red")]),
    ]
    shown = columns if any(span.error for group in groups for span in group) else columns[:-1]
    return make_table(shown, groups)


def _name(group: "Sequence[Span]") -> str:
    return group[0].name if len(group) == 1 else f"{len(group)} x {group[0].name}"


def _style(span: "Span") -> str:
    is_part = len(span.path) > 2
    return "red" if span.error else "dim" if is_part else ""


def _bar(group: "Sequence[Span]", total_s: float) -> str:
    """Returns the bar of a group, in which each span has at least one cell."""
    cells = [" "] * _BAR_CELLS
    for span in group:
        first = min(round(span.start_s / total_s * _BAR_CELLS), _BAR_CELLS - 1)
        end = max(first + 1, round(span.end_s / total_s * _BAR_CELLS))
        cells[first:end] = "█" * (end - first)
    return "".join(cells).rstrip()


def _write(path: Path, spans: "Sequence[Span]") -> None:
    """Writes the spans as complete events of the trace event format, with one thread for each process.

    Raises InvalidRequestError (CANNOT_WRITE) if the file cannot be written.
    """
    threads = {name: number for number, name in enumerate(dict.fromkeys(span.process for span in spans))}
    names = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in threads.items()
    ]
    events = [
        {
            "ph": "X",
            "pid": 1,
            "tid": threads[span.process],
            "name": span.name,
            "ts": span.start_s * _US,
            "dur": (span.end_s - span.start_s) * _US,
            "args": {**span.attributes, **({"error": span.error} if span.error else {})},
        }
        for span in spans
    ]
    with writing(path):
        path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}, indent=1) + "\n")
