"""Pieces of output that several commands share."""

import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stagemesh.client import EdgeInfo, Finished, LinkInfo, Result

_UNCUT_COLUMNS = 240
_STYLES = {
    "ready": "green",
    "starting": "cyan",
    "loading": "cyan",
    "draining": "yellow",
    "asleep": "yellow",
    "restarting": "yellow",
    "failed": "red",
    "unreachable": "red",
    "stopped": "dim",
}


def print_whole(what: RenderableType) -> None:
    """Prints to stdout; where that is no terminal, which has a width, nothing is cut short."""
    Console(highlight=False, width=None if sys.stdout.isatty() else _UNCUT_COLUMNS).print(what)


def styled_state(state: str, detail: str = "") -> Text:
    """A state in its colour, with what there is to say about it."""
    return Text.assemble((state, _STYLES.get(state, "")), (f"  {detail}" if detail else "", "dim"))


def summary(result: Result) -> RenderableType:
    """How long a request took, and what crossed its edges."""
    times = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in _times(result):
        times.add_row(label, value)
    return Group(times, edges_table(result.finished))


def edges_table(finished: Finished) -> Table:
    """What crossed each edge and how."""
    table = Table("edge", "connector", "chunks", "bytes")
    for column in table.columns[2:]:
        column.justify = "right"
    for edge in finished.edges:
        table.add_row(edge.edge, edge.connector, str(edge.chunks), f"{edge.size_bytes:,}")
    return table


def links_table(edges: Sequence[EdgeInfo]) -> Table:
    """What each edge uses between its replicas, and why nothing better; replicas that agree share a row."""
    table = Table("edge", "replicas", "connector", box=None, padding=(0, 2, 0, 0))
    for edge in edges:
        rows: dict[tuple[str, str], list[str]] = {}
        for link in edge.links:
            rows.setdefault((link.connector, _why(link)), []).append(f"{link.producer} to {link.consumer}")
        for (connector, why), pairs in rows.items():
            among = pairs[0] if len(pairs) == 1 else "all" if len(rows) == 1 else ", ".join(pairs)
            table.add_row(Text(edge.name), Text(among), Text.assemble(connector or "not known", (why, "dim")))
        if not rows:
            table.add_row(Text(edge.name), "none are ready", f"{edge.connector} is asked for")
    return table


def _why(link: LinkInfo) -> str:
    reasons = [f"{name}: {why}" for name, why in link.refusals.items()] or [link.error] * bool(link.error)
    return f"  ({'; '.join(reasons)})" if reasons else ""


def audio_s(result: Result) -> float:
    """How long the result's audio sounds."""
    return sum(audio.duration_s for audio in result.audios.values())


def real_time_factor(result: Result) -> float | None:
    """Seconds of work for a second of audio; None without audio."""
    sounding_s = audio_s(result)
    return result.total_s / sounding_s if sounding_s else None


def _times(result: Result) -> list[tuple[str, str]]:
    rows: list[tuple[str, float | None, str]] = [
        ("time to first text", result.first_text_s, " s"),
        ("time to first audio", result.first_audio_s, " s"),
        ("audio", audio_s(result) or None, " s"),
        ("time to first picture", result.first_image_s, " s"),
        ("total", result.total_s, " s"),
        ("real-time factor", real_time_factor(result), ""),
    ]
    return [(label, f"{value:.2f}{unit}") for label, value, unit in rows if value is not None]
