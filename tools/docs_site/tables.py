"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def escape(text: str) -> str:
    """Returns plain text as the content of a cell on one line."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, with a blank line at its end. Cells are Markdown without line breaks."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]
