"""The displays of `up` and `demo` for the processes that they run: a live table, lines of text, or lines of JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER
from stagemesh.orchestrator.cli.output import (
    Cell,
    Column,
    links_table,
    make_table,
    print_json,
    state_cell,
    to_json,
    to_text,
)
from stagemesh.orchestrator.launcher import ProcessState, ProcessStatus
from stagemesh.v1.orchestrator_pb2 import EdgeDescription


class Display(Protocol):
    """Shows the processes of a launcher."""

    def show(self, status: ProcessStatus) -> None:
        """Shows the new status of a process."""

    def ready(self, endpoint: str, *, edges: Sequence[EdgeDescription], hint: str, admin_endpoint: str = "") -> None:
        """Shows that all processes are ready, and a hint about the next command.

        Clients are served at `endpoint`, operators at `admin_endpoint` unless that is empty.
        """

    def close(self, message: str = "") -> None:
        """Ends the display with a summary. Closing twice is harmless."""


def make_display(*, as_json: bool) -> Display:
    """Returns the display for JSON, for a terminal or, if stderr is not a terminal, for plain text."""
    if as_json:
        return JsonDisplay()
    console = Console(stderr=True, highlight=False)
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


class LineDisplay:
    """Prints a line for each change, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, status: ProcessStatus) -> None:
        """Prints the status on a line."""
        self._print(Text.assemble(f"{status.name}: ", to_text(_state(status))))

    def ready(self, endpoint: str, *, edges: Sequence[EdgeDescription], hint: str, admin_endpoint: str = "") -> None:
        """Prints the connectors of the edges, the addresses, and the hint."""
        if edges:
            self._console.print(links_table(edges), soft_wrap=True)
        self._print(Text.assemble(("ready", "bold green"), f" at {endpoint}; {hint}"))
        if admin_endpoint:
            where = "" if admin_endpoint == DEFAULT_ADMIN_SERVER else f" --server {admin_endpoint}"
            self._print(Text(f"operators at {admin_endpoint}; try: stagemesh top{where}"))

    def close(self, message: str = "") -> None:
        """Prints the summary."""
        if message:
            self._print(Text(message))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


class LiveDisplay:
    """Updates a table in place until all processes are ready, and prints lines after that."""

    def __init__(self, console: Console) -> None:
        self._lines = LineDisplay(console)
        self._statuses: dict[str, ProcessStatus] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._loading = True
        self._live.start()

    def show(self, status: ProcessStatus) -> None:
        """Updates the row of a process, or prints a line."""
        if not self._loading:
            self._lines.show(status)
            return
        self._statuses[status.name] = status
        self._live.update(self._table())

    def ready(self, endpoint: str, *, edges: Sequence[EdgeDescription], hint: str, admin_endpoint: str = "") -> None:
        """Stops updating the table, and prints the addresses and the hint."""
        self._stop()
        self._lines.ready(endpoint, edges=edges, hint=hint, admin_endpoint=admin_endpoint)

    def close(self, message: str = "") -> None:
        """Stops updating the terminal, and prints the summary."""
        self._stop()
        self._lines.close(message)

    def _stop(self) -> None:
        self._loading = False
        self._live.stop()

    def _table(self) -> Table:
        return make_table(_PROCESSES, self._statuses.values())


class JsonDisplay:
    """Prints one JSON document per line to stdout."""

    def show(self, status: ProcessStatus) -> None:
        """Prints an event "process" with the status."""
        print_json({"event": "process", **asdict(status), "state": status.state.value})

    def ready(self, endpoint: str, *, edges: Sequence[EdgeDescription], hint: str, admin_endpoint: str = "") -> None:
        """Prints an event "ready" with the addresses and the edges, which are in protobuf's JSON mapping."""
        print_json(
            {
                "event": "ready",
                "endpoint": endpoint,
                "admin_endpoint": admin_endpoint,
                "edges": [to_json(edge) for edge in edges],
                "hint": hint,
            }
        )

    def close(self, message: str = "") -> None:
        """Prints an event "stopped" with the summary."""
        if message:
            print_json({"event": "stopped", "message": message})


class RestartCounter:
    """Passes statuses to a display, and counts the restarts for its summary."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.restarts = 0

    def __call__(self, status: ProcessStatus) -> None:
        """Counts a restart, and shows the status."""
        self.restarts += status.state is ProcessState.RESTARTING
        self._display.show(status)


def _state(status: ProcessStatus) -> Cell:
    return state_cell(status.state.value, status.detail)


_PROCESSES = (
    Column("process", lambda status: status.name),
    Column("endpoint", lambda status: status.endpoint),
    Column("state", _state),
)
