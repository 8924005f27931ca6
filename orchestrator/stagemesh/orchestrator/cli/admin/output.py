"""How answers are shown: as JSON, or as tables."""

import json
import sys
from collections.abc import Sequence

import typer
from google.protobuf.message import Message
from rich.console import RenderableType
from rich.table import Table

from stagemesh.orchestrator.cli.admin.json_output import to_plain
from stagemesh.orchestrator.cli.tables import print_whole


def show_json(message: Message) -> None:
    """Writes a message on one line."""
    typer.echo(json.dumps(to_plain(message), ensure_ascii=False))


def show_page(message: Message, table: RenderableType, *, as_json: bool, next_token: str) -> None:
    """Writes a page, and where it goes on."""
    if as_json:
        show_json(message)
        return
    print_whole(table)
    if next_token:
        sys.stderr.write(f"there is more: --page-token {next_token}\n")


def make_table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table; the columns in `right` are figures."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for column in table.columns:
        if column.header in right:
            column.justify = "right"
    return table
