"""Virtual environments that hold exactly the distributions that an extra of this project asks for."""

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from tests.repository.commands import ROOT

_OURS = "stagemesh"
STAGEMESH = (
    "-c",
    "from importlib.metadata import entry_points; entry_points(group='console_scripts')['stagemesh'].load()()",
)
"""The arguments of an environment's interpreter that run the command `stagemesh`."""


def make_environment(folder: Path, *, extras: Iterable[str], wheel: Path) -> Path:
    """Creates a virtual environment in `folder` and returns its interpreter.

    It links the distributions that `stagemesh[extras]` requires, directly or not, out of the environment that runs the
    tests. Nothing is downloaded, and no other distribution can be imported. Stagemesh itself is linked to `wheel`, the
    folder of an unpacked wheel.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    _link(packages, _Tree.of_all(), wanted=required(extras) - {_OURS})
    for path in wheel.iterdir():
        (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def required(extras: Iterable[str]) -> set[str]:
    """Returns the names of the distributions that `stagemesh[extras]` needs, itself included.

    A requirement that is not installed here is left out: the tests run on one platform with one build of each.
    """
    found: set[tuple[str, str]] = set()
    open_items = [(_OURS, extra) for extra in ("", *extras)]
    while open_items:
        item = open_items.pop()
        if item in found or item[0] not in _installed():
            continue
        found.add(item)
        name, extra = item
        for requirement in _requirements(name, extra):
            open_items += [(_normalized(requirement.name), each) for each in ("", *requirement.extras)]
    return {name for name, _ in found}


def _requirements(name: str, extra: str) -> list[Requirement]:
    if name == _OURS:
        # An editable installation keeps the requirements of the day on which it was made.
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    else:
        texts = _installed()[name].requires or ()
    requirements = [Requirement(text) for text in texts]
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]


class _Tree:
    """Files and folders of site-packages, with the distributions that own something in each."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.owners: set[str] = set()
        self.children: dict[str, _Tree] = {}

    @classmethod
    @cache
    def of_all(cls) -> Mapping[str, "_Tree"]:
        """Returns the top level of all installed distributions."""
        root = cls(Path())
        for name, distribution in _installed().items():
            for file in distribution.files or ():
                if name != _OURS and file.parts[0] != "..":
                    root._add(name, file, Path(str(distribution.locate_file(""))))
        return root.children

    def _add(self, owner: str, file: PurePosixPath, base: Path) -> None:
        node = self
        for depth, part in enumerate(file.parts, 1):
            node = node.children.setdefault(part, _Tree(base.joinpath(*file.parts[:depth])))
            node.owners.add(owner)


def _link(target: Path, nodes: Mapping[str, _Tree], *, wanted: set[str]) -> None:
    """Links what the wanted distributions own; a folder that they share with others is created and filled."""
    for name, node in nodes.items():
        if node.owners <= wanted:
            (target / name).symlink_to(node.source)
        elif node.owners & wanted:
            (target / name).mkdir()
            _link(target / name, node.children, wanted=wanted)


@cache
def _installed() -> Mapping[str, Distribution]:
    """The first distribution of each name is the one that is imported."""
    by_name: defaultdict[str, list[Distribution]] = defaultdict(list)
    for distribution in distributions():
        by_name[_normalized(distribution.name)].append(distribution)
    return {name: found[0] for name, found in by_name.items()}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
