"""Compares the figures of two versions of the project: the working tree, and a commit before it.

python -m benchmarks.compare BASE [--benchmark NAME]... [--rounds 5] [--json FILE]

The versions run each benchmark in alternation, so that a slow hour of the machine affects both. A figure has changed if
its values in all rounds are above, or below, all values of the other version. With five rounds, noise alone does that
to 1 figure in 126. Both versions use the installed packages of this environment, apart from Stagemesh itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_BENCHMARKS = ("orchestrator", "ar_stage", "edges")
_FAILED = 2


@dataclass(frozen=True)
class Key:
    """The identity of a figure in all runs."""

    benchmark: str
    subject: str
    name: str
    unit: str
    goal: str


@dataclass(frozen=True)
class Comparison:
    """The values of a figure in all rounds, by version."""

    key: Key
    base: Sequence[float]
    head: Sequence[float]

    @property
    def ratio(self) -> float:
        """The median of the working tree divided by that of the base. NaN if the latter is 0."""
        base = statistics.median(self.base)
        return statistics.median(self.head) / base if base else float("nan")

    @property
    def has_changed(self) -> bool:
        """Whether the values of the two versions do not overlap."""
        return max(self.base) < min(self.head) or max(self.head) < min(self.base)

    @property
    def is_worse(self) -> bool:
        """Whether the figure has changed in the direction away from its goal. False without a goal."""
        grows = min(self.head) > max(self.base)
        return self.has_changed and self.key.goal[:2] == ("<=" if grows else ">=")


def compare(base: Sequence[Mapping[Key, float]], head: Sequence[Mapping[Key, float]]) -> list[Comparison]:
    """Returns the comparisons of the figures that all runs of both versions have. A run maps figures to values."""
    first, *others = [*base, *head]
    return [
        Comparison(key, [run[key] for run in base], [run[key] for run in head])
        for key in first
        if all(key in run for run in others)
    ]


@contextmanager
def checked_out(commit: str, root: Path = ROOT) -> Generator[Path]:
    """Yields a folder with the files of a commit. Exits with an error of git if the commit does not exist."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        _git(root, "worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            _git(root, "worktree", "remove", "--force", str(folder))


def measure(benchmark: str, version: Path) -> dict[Key, float]:
    """Runs a benchmark of a version, and returns its figures. Missed goals are not an error.

    Raises RuntimeError if the benchmark writes no figures.
    """
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "figures.json"
        path = os.pathsep.join((temporary, *_sources(version, Path(temporary))))
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", str(file)]
        done = subprocess.run(
            command, cwd=version, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        if not file.exists():
            raise RuntimeError(f"benchmarks.{benchmark} of {version} wrote no figures:\n{done.stderr[-2000:]}")
        written = json.loads(file.read_text())
    return {
        Key(benchmark, each.get("subject", ""), each["name"], each["unit"], each.get("goal", "")): each["value"]
        for each in (*written["results"], *written.get("details", []))
    }


def _sources(version: Path, information: Path) -> list[str]:
    """Returns the source roots of a version. Writes its entry points into the folder `information`.

    The entry points of the installed version would name modules that this version may not have.
    """
    project = tomllib.loads((version / "pyproject.toml").read_text())
    groups = {**project["project"]["entry-points"], "console_scripts": project["project"]["scripts"]}
    lines = [line for group, names in groups.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    folder = information / f"stagemesh-{project['project']['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: stagemesh\nVersion: {project['project']['version']}\n"
    )
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return [str(version / source) for source in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]


def _git(root: Path, *arguments: str) -> None:
    command = ["git", "-C", str(root), *arguments]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(_FAILED)


def _table(comparisons: Sequence[Comparison]) -> Table:
    table = Table("benchmark", "figure", "unit", "base", "now", "ratio", "")
    for each in comparisons:
        verdict = "[red]worse[/]" if each.is_worse else "changed" if each.has_changed else ""
        name = " ".join(part for part in (each.key.subject, each.key.name) if part)
        base, head = (
            f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
            for values in (each.base, each.head)
        )
        table.add_row(each.key.benchmark, name, each.key.unit, base, head, f"{each.ratio:.3f}", verdict)
    return table


def _write(file: Path, comparisons: Sequence[Comparison]) -> None:
    results = [
        {
            "name": " / ".join(part for part in (each.key.benchmark, each.key.subject, each.key.name) if part),
            "value": each.ratio,
            "unit": "now / base",
            "goal": "",
            "has_changed": each.has_changed,
            "is_worse": each.is_worse,
            "base": list(each.base),
            "now": list(each.head),
        }
        for each in comparisons
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"benchmark": "compare", "results": results}, indent=2) + "\n")


def main() -> None:
    """Compares the versions. Exits with status 1 if a figure with a goal is worse than in the base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="The commit to compare with, for example HEAD~1.")
    parser.add_argument("--benchmark", action="append", help="The name of a benchmark. Repeatable.")
    parser.add_argument("--rounds", type=int, default=5, help="The number of runs of each version. At least 2.")
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: with fewer than 2, noise and change look the same")
    console, comparisons = Console(), list[Comparison]()
    with checked_out(arguments.base) as base:
        for benchmark in arguments.benchmark or DEFAULT_BENCHMARKS:
            runs: dict[Path, list[dict[Key, float]]] = {base: [], ROOT: []}
            for number in range(arguments.rounds):
                for version in (base, ROOT) if number % 2 else (ROOT, base):
                    with console.status(f"{benchmark}: round {number + 1} of {arguments.rounds}"):
                        runs[version].append(measure(benchmark, version))
            comparisons += compare(runs[base], runs[ROOT])
    console.print(_table(comparisons))
    if arguments.json is not None:
        _write(arguments.json, comparisons)
    sys.exit(1 if any(each.is_worse for each in comparisons) else 0)


if __name__ == "__main__":
    main()
