"""Displays of the processes that `up` and `demo` run: lines of text, a live table, or lines of JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stagemesh.cli.launcher import Launcher, ProcessState, ProcessStatus
from stagemesh.cli.terminal.contexts import DEFAULT_ADMIN_SERVER
from stagemesh.cli.terminal.output import links_table, print_json, to_json
from stagemesh.cli.terminal.tables import Cell, Column, fields, make_table, state_cell, to_text
from stagemesh.v1.orchestrator_pb2 import EdgeDescription


def make_display(*, as_json: bool) -> "Display":
    """Returns a display of JSON lines if `as_json` is True, and otherwise a display of text."""
    return JsonDisplay(live=False) if as_json else Display(live=True)


class Display:
    """Displays each change of a process's status on stderr.

    If `live` is True and stderr is a terminal, updates a table in place until all processes are ready. Without the
    table, prints one line for each change, which suits logs and pipes.
    """

    def __init__(self, *, live: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._statuses: dict[str, ProcessStatus] = {}
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        if live and self._console.is_terminal:
            self._live.start()
        self.restarts = 0
        """The total number of restarts of all processes so far."""

    def show(self, status: ProcessStatus) -> None:
        """Displays the new status of a process. Increments `restarts` if the process is restarting."""
        self.restarts += status.state is ProcessState.RESTARTING
        self._show(status)

    def ready(
        self, launcher: Launcher, edges: Sequence[EdgeDescription], *, hint: str, logs: Path, operator: str | None
    ) -> None:
        """Displays that all processes of the launcher are ready.

        - `edges` are the edges whose connectors are displayed.
        - `hint` is the next command, as a suggestion to the user.
        - `logs` is the folder with the logs.
        - `operator` are the options with which commands for operators connect. If it is None, neither the address for
          operators nor the logs are displayed.
        """
        self._live.stop()
        if edges:
            self._console.print(links_table(edges), soft_wrap=True)
        self._print(Text.assemble(("ready", "bold green"), f" at {launcher.endpoint}; {hint}"))
        if operator is not None:
            address = launcher.admin_endpoint
            server = "" if address == DEFAULT_ADMIN_SERVER else f" --server {address}"
            self._print(Text(f"operators at {address}; try: stagemesh top{server}{operator}"))
        if launcher.gateway_url:
            self._print(Text(f"OpenAI's API at {launcher.gateway_url}"))
        for name, endpoint in launcher.metrics_endpoints.items():
            self._print(Text(f"metrics of {name} at http://{endpoint}/metrics"))
        if operator is not None:
            self._print(Text(f"logs in {logs}; try: stagemesh logs -f"))

    def close(self, message: str = "") -> None:
        """Stops updating the display. Prints `message` unless it is empty. May be called more than once."""
        self._live.stop()
        if message:
            self._print(Text(message))

    def _show(self, status: ProcessStatus) -> None:
        if self._live.is_started:
            self._statuses[status.name] = status
            self._live.update(make_table(_PROCESSES, self._statuses.values()))
        else:
            self._print(Text.assemble(f"{status.name}: ", to_text(_state(status))))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


class JsonDisplay(Display):
    """Prints one JSON document per line to stdout: the events "process", "ready" and "stopped"."""

    def ready(
        self, launcher: Launcher, edges: Sequence[EdgeDescription], *, hint: str, logs: Path, operator: str | None
    ) -> None:
        print_json(
            {
                "event": "ready",
                "endpoint": launcher.endpoint,
                "admin_endpoint": "" if operator is None else launcher.admin_endpoint,
                "metrics_endpoints": launcher.metrics_endpoints,
                "gateway_url": launcher.gateway_url,
                "logs": str(logs),
                "edges": [to_json(edge) for edge in edges],
                "hint": hint,
            }
        )

    def close(self, message: str = "") -> None:
        if message:
            print_json({"event": "stopped", "message": message})

    def _show(self, status: ProcessStatus) -> None:
        print_json({"event": "process", **asdict(status), "state": status.state.value})


def _state(status: ProcessStatus) -> Cell:
    return state_cell(status.state.value, status.detail)


_PROCESSES = (Column("process", lambda status: status.name), *fields("endpoint"), Column("state", _state))
