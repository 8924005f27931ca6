"""The report of every benchmark: named figures with their goals."""

import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Figure:
    """A measured value. `goal` is for example "<=1.15" or ">=0.8", or empty if there is none."""

    name: str
    value: float
    unit: str
    goal: str = ""
    subject: str = ""
    """The group of the figure: figures of one subject are printed together."""

    @property
    def met(self) -> bool | None:
        """Whether the value meets its goal, or None if there is none."""
        return _COMPARISONS[self.goal[:2]](self.value, float(self.goal[2:])) if self.goal else None


def report(
    benchmark: str,
    figures: Sequence[Figure],
    *,
    json_file: Path | None,
    details: Sequence[Figure] = (),
    left_out: Mapping[str, str] | None = None,
) -> None:
    """Prints a table, writes JSON to `json_file` if given, and exits with status 0 if every goal is met, else 1.

    `details` are written but not printed. `left_out` maps figures that could not be measured here to the reason. Their
    goals count as missed.
    """
    missing = left_out or {}
    console = Console()
    console.print(_table(benchmark, figures))
    for reason in dict.fromkeys(missing.values()):
        names = "; ".join(name for name in missing if missing[name] == reason)
        console.print(f"left out: {names}\n  because {reason}", highlight=False, markup=False, soft_wrap=True)
    if json_file is not None:
        results = [asdict(figure) for figure in (*figures, *details)]
        document = {"benchmark": benchmark, "results": results, "left_out": missing}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(0 if not missing and all(figure.met is not False for figure in figures) else 1)


def _table(benchmark: str, figures: Sequence[Figure]) -> Table:
    table = Table("figure", "value", "unit", "goal", "", title=benchmark, title_justify="left")
    subject = ""
    for figure in figures:
        if figure.subject != subject:
            subject = figure.subject
            table.add_section()
            table.add_row(f"[bold]{subject}[/]")
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.met]
        table.add_row(figure.name, f"{figure.value:.3f}", figure.unit, figure.goal, verdict)
    return table
