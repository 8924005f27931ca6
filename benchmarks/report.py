"""The report of every benchmark: named figures with their goals, and the machine that they were measured on."""

import json
import operator
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_PROCESSORS = Path("/proc/cpuinfo")
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "i8mm", "bf16", "sve")
"""The instructions on which the speed of models depends, by their names in Linux on x86 and ARM."""


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


@dataclass(frozen=True)
class Processor:
    """The processors of a machine: their name, their number and those of their features that make models fast."""

    name: str
    count: int
    features: Sequence[str] = ()
    gpus: Sequence[str] = ()
    """The names of the machine's GPUs, if the benchmark has imported torch."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark's JSON file.

    `details` are figures that are not printed. `left_out` maps figures that could not be measured to the reason. `date`
    is the day in UTC as YYYY-MM-DD, and `version` is that of Stagemesh. Files of older versions have neither these nor
    the processor.
    """

    benchmark: str
    results: Sequence[Figure]
    details: Sequence[Figure] = ()
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    date: str = ""
    version: str = ""
    processor: Processor | None = None


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
        document = Report(
            benchmark=benchmark,
            results=figures,
            details=details,
            left_out=missing,
            date=datetime.now(UTC).date().isoformat(),
            version=version("stagemesh"),
            processor=_describe_processor(),
        )
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(asdict(document), indent=2) + "\n")
    sys.exit(0 if not missing and all(figure.met is not False for figure in figures) else 1)


def _describe_processor() -> Processor:
    """Returns this machine's processor. It has no features if the system is not Linux."""
    lines = _PROCESSORS.read_text().splitlines() if _PROCESSORS.exists() else []
    facts = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    flags = facts.get("flags", facts.get("Features", "")).split()
    torch = sys.modules.get("torch")
    gpus = range(torch.cuda.device_count()) if torch is not None else ()
    return Processor(
        facts.get("model name", platform.machine()),
        os.cpu_count() or 1,
        [name for name in _FEATURES if name in flags],
        [torch.cuda.get_device_name(gpu) for gpu in gpus] if torch is not None else [],
    )


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
