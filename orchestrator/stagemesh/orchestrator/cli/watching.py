"""The option --watch of commands that print lists, and the display that is refreshed until Ctrl-C."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from stagemesh.orchestrator.cli.options import Parameter, flag, option
from stagemesh.orchestrator.cli.output import print_all

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERVAL = option(
    float,
    "Set the number of seconds between two updates.",
    "--interval",
    "-n",
    default=1.0,
    min=0.2,
    metavar="SECONDS",
)
WATCH: Mapping[str, Parameter] = {
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
