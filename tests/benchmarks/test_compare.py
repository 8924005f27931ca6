"""The comparison of the benchmarks of two versions."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.compare import Comparison, Key, checked_out, compare, measure
from tests.repository.commands import git

BENCHMARK = """\
import json, sys
from importlib.metadata import entry_points
from pathlib import Path
VALUE = entry_points(group="stagemesh.engines")["made"].load()
result = {"name": "time", "value": VALUE, "unit": "s", "goal": "<=2", "subject": "all"}
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"benchmark": "made", "results": [result]}))
sys.exit(1)
"""
PROJECT = """\
[project]
version = "1"
scripts = {{}}
entry-points = {{"stagemesh.engines" = {{made = "stagemesh.{package}.made:VALUE"}}}}
[tool.hatch.build]
dev-mode-dirs = ["{root}"]
"""


def comparison(base: Sequence[float], head: Sequence[float], *, goal: str = "<=2") -> Comparison:
    return Comparison(Key("made", "", "time", "s", goal), base, head)


@pytest.mark.parametrize(
    ("base", "head", "goal", "has_changed", "is_worse"),
    [
        ([1.0, 1.2], [1.1, 1.3], "<=2", False, False),
        ([1.0, 1.2], [1.3, 1.4], "<=2", True, True),
        ([1.0, 1.2], [0.8, 0.9], "<=2", True, False),
        ([1.0, 1.2], [0.8, 0.9], ">=2", True, True),
        ([1.0, 1.2], [0.8, 0.9], "", True, False),
    ],
)
def test_a_change_is_larger_than_the_noise(
    base: Sequence[float], head: Sequence[float], goal: str, has_changed: bool, is_worse: bool
) -> None:
    found = comparison(base, head, goal=goal)
    assert (found.has_changed, found.is_worse) == (has_changed, is_worse)


def test_figures_that_one_version_lacks_are_left_out() -> None:
    shared, new = Key("made", "", "time", "s", ""), Key("made", "", "memory", "MB", "")
    (found,) = compare([{shared: 1.0}, {shared: 2.0}], [{shared: 4.0, new: 1.0}, {shared: 5.0, new: 1.0}])
    assert found == Comparison(shared, [1.0, 2.0], [4.0, 5.0])
    assert found.ratio == pytest.approx(3.0)


def test_each_version_measures_its_own_source_roots_and_entry_points(tmp_path: Path) -> None:
    def write(root: str, package: str, value: float) -> None:
        module = tmp_path / root / "stagemesh" / package / "made.py"
        module.parent.mkdir(parents=True)
        module.write_text(f"VALUE = {value}\n")
        (tmp_path / "pyproject.toml").write_text(PROJECT.format(root=root, package=package))

    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/made.py").write_text(BENCHMARK)
    write("services", "engines", 1.0)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "base")
    shutil.rmtree(tmp_path / "services")
    write("engines", "plugins", 3.0)
    with checked_out("HEAD", root=tmp_path) as base:
        values = [list(measure("made", version).values()) for version in (base, tmp_path)]
    assert values == [[1.0], [3.0]]
    assert not base.exists()


def test_a_benchmark_without_figures_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(root="services", package="engines"))
    with pytest.raises(RuntimeError, match="No module named"):
        measure("missing", tmp_path)
