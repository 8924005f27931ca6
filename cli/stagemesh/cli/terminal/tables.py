"""Tables of the terminal: their columns, their cells, and the colors of states."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STATES_BY_STYLE = {
    "green": ("ready", "running", "succeeded"),
    "cyan": ("starting", "loading", "queued"),
    "yellow": ("waiting", "draining", "asleep", "restarting", "cancelled"),
    "red": ("failed", "unreachable"),
    "dim": ("stopped", "finished"),
}
_STYLES = {state: style for style, states in _STATES_BY_STYLE.items() for state in states}

Cell: TypeAlias = "str | int | list[tuple[str, str]]"
"""The content of a table cell: plain text, a count, or a list of segments (text, style)."""


@dataclass(frozen=True)
class Column:
    """A column of a table. `cell` takes a row and returns the content of the cell in this column.

    If `right` is True, the cells are aligned to the right.
    """

    title: str
    cell: Callable[[Any], Cell]
    right: bool = False


def number(title: str, cell: Callable[[Any], Cell]) -> Column:
    """Returns a right-aligned table column for numbers. `cell` takes a row and returns the number."""
    return Column(title, cell, right=True)


def fields(*names: str) -> list[Column]:
    """Returns a table column for each of these attributes of a row. The title is the name of the attribute."""
    return [Column(name, attrgetter(name)) for name in names]


def numbers(*names: str) -> list[Column]:
    """Returns a right-aligned table column for each of these numeric attributes of a row.

    The title is the name of the attribute.
    """
    return [number(name, attrgetter(name)) for name in names]


def make_table(columns: Sequence[Column], rows: Iterable[object], *, title: str | None = None) -> "Table":
    """Returns a table with one row for each element of `rows`. The table has no title if `title` is None."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left")
    for row in rows:
        table.add_row(*(to_text(column.cell(row)) for column in columns))
    return table


def to_text(cell: Cell) -> "Text":
    """Returns the content of a table cell as rich text. Brackets are printed literally, not interpreted as markup."""
    from rich.text import Text

    if isinstance(cell, list):
        return Text.assemble(*cell)
    return Text(f"{cell:,}" if isinstance(cell, int) else cell)


def state_cell(state: str, detail: str = "") -> Cell:
    """Returns a table cell with a state in the color of this state, followed by `detail` in dimmed text."""
    return [(state, _STYLES.get(state, "")), (f"  {detail}" if detail else "", "dim")]
