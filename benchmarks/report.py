"""What every benchmark prints and writes: named figures beside their goals."""

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
    """A measured value; `goal` is "<=1.15", ">=0.8" or empty where there is none."""

    name: str
    value: float
    unit: str
    goal: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value reaches its goal; None without one."""
        return _COMPARISONS[self.goal[:2]](self.value, float(self.goal[2:])) if self.goal else None


def report(benchmark: str, figures: Sequence[Figure], *, json_file: Path | None) -> None:
    """Prints a table, writes JSON where asked, and ends the process: 0 when every goal is met, else 1."""
    table = Table("figure", "value", "unit", "goal", "", title=benchmark, title_justify="left")
    for figure in figures:
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.met]
        table.add_row(figure.name, f"{figure.value:.3f}", figure.unit, figure.goal, verdict)
    Console().print(table)
    if json_file is not None:
        document = {"benchmark": benchmark, "results": [asdict(figure) for figure in figures]}
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(0 if all(figure.met is not False for figure in figures) else 1)
