"""The origin of each value of a pipeline: a line of the file, a variable, or an override."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and list positions that lead from the top of the file to a value."""


@dataclass(frozen=True)
class Origin:
    """The origin of a value, for error messages and for `pipeline explain`."""

    line: int
    """The line number, starting at 1. 0 for a value that is not from the file."""
    place: str
    """The start of an error message: "file:line" or "--set KEY"."""
    label: str
    """The text that `pipeline explain` shows: "file:line", "variable X" or "override"."""


@dataclass(frozen=True)
class Origins:
    """The origins of a file's values by path. The empty path stands for the whole file."""

    by_path: Mapping[KeyPath, Origin]

    def get(self, path: KeyPath) -> Origin | None:
        """Returns the origin of exactly this value, or None if the value is a default."""
        return self.by_path.get(path)

    def nearest(self, path: KeyPath) -> Origin:
        """Returns the origin of a value, or the origin of the closest surrounding value that has one.

        Skips elements of the path that are not in the file, such as a validator's tags.
        """
        reached: KeyPath = ()
        for element in path:
            if (*reached, element) in self.by_path:
                reached = (*reached, element)
        return self.by_path[reached]


def dotted(path: KeyPath) -> str:
    """Returns a path as text, such as "edges.0.connector"."""
    return ".".join(map(str, path))
