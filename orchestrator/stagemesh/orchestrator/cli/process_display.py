"""How `up` and `demo` show processes: a live table, lines, or JSON lines."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stagemesh.client import EdgeInfo
from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER
from stagemesh.orchestrator.cli.tables import links_table, styled_state
from stagemesh.orchestrator.launcher import ProcessState, ProcessStatus


class Display(Protocol):
    """Shows what a launcher tells."""

    def show(self, status: ProcessStatus) -> None:
        """A process has changed."""

    def ready(self, endpoint: str, *, edges: Sequence[EdgeInfo], hint: str, admin_endpoint: str = "") -> None:
        """Everything is up; `hint` says how to go on. Operators are served at `admin_endpoint`, if anywhere."""

    def close(self, message: str = "") -> None:
        """Nothing more comes; `message` sums up. Closing twice is harmless."""


def make_display(*, as_json: bool) -> Display:
    """The display that suits where the output goes."""
    if as_json:
        return JsonDisplay()
    console = Console(stderr=True, highlight=False)
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


class LineDisplay:
    """A line for each change, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, status: ProcessStatus) -> None:
        """Writes a line."""
        self._print(Text.assemble(f"{status.name}: ", styled_state(status.state.value, status.detail)))

    def ready(self, endpoint: str, *, edges: Sequence[EdgeInfo], hint: str, admin_endpoint: str = "") -> None:
        """Says what the edges use, where it is, and how to go on."""
        if edges:
            self._console.print(links_table(edges), soft_wrap=True)
        self._print(Text.assemble(("ready", "bold green"), f" at {endpoint}; {hint}"))
        if admin_endpoint:
            where = "" if admin_endpoint == DEFAULT_ADMIN_SERVER else f" --server {admin_endpoint}"
            self._print(Text(f"operators at {admin_endpoint}; try: stagemesh top{where}"))

    def close(self, message: str = "") -> None:
        """Says how it ended."""
        if message:
            self._print(Text(message))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


class LiveDisplay:
    """A table that changes in place until everything is ready, then lines."""

    def __init__(self, console: Console) -> None:
        self._lines = LineDisplay(console)
        self._statuses: dict[str, ProcessStatus] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._loading = True
        self._live.start()

    def show(self, status: ProcessStatus) -> None:
        """Changes a row, or writes a line."""
        if not self._loading:
            self._lines.show(status)
            return
        self._statuses[status.name] = status
        self._live.update(self._table())

    def ready(self, endpoint: str, *, edges: Sequence[EdgeInfo], hint: str, admin_endpoint: str = "") -> None:
        """Leaves the table as it is and says how to go on."""
        self._stop()
        self._lines.ready(endpoint, edges=edges, hint=hint, admin_endpoint=admin_endpoint)

    def close(self, message: str = "") -> None:
        """Gives the terminal back."""
        self._stop()
        self._lines.close(message)

    def _stop(self) -> None:
        self._loading = False
        self._live.stop()

    def _table(self) -> Table:
        table = Table("process", "endpoint", "state", box=None, padding=(0, 2, 0, 0))
        for status in self._statuses.values():
            table.add_row(status.name, status.endpoint, styled_state(status.state.value, status.detail))
        return table


class JsonDisplay:
    """A JSON document a line, on stdout."""

    def show(self, status: ProcessStatus) -> None:
        """Writes the status."""
        _write({"event": "process", **asdict(status)})

    def ready(self, endpoint: str, *, edges: Sequence[EdgeInfo], hint: str, admin_endpoint: str = "") -> None:
        """Says where to call."""
        _write(
            {
                "event": "ready",
                "endpoint": endpoint,
                "admin_endpoint": admin_endpoint,
                "edges": [asdict(edge) for edge in edges],
                "hint": hint,
            }
        )

    def close(self, message: str = "") -> None:
        """Says how it ended."""
        if message:
            _write({"event": "stopped", "message": message})


class RestartCounter:
    """A display's neighbour: counts what a summary tells."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.restarts = 0

    def __call__(self, status: ProcessStatus) -> None:
        """Counts and passes on."""
        self.restarts += status.state is ProcessState.RESTARTING
        self._display.show(status)


def _write(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False, default=_word) + "\n")
    sys.stdout.flush()


def _word(value: object) -> object:
    assert isinstance(value, Enum)
    return value.value
