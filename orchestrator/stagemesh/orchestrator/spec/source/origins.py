"""Describes where each value of a pipeline was set: in a line of the file, by a variable, or by an override."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and list indexes that lead from the root of the file to a value."""


@dataclass(frozen=True)
class Origin:
    """The place where a value was set, for error messages and for `stagemesh pipeline explain`."""

    line: int
    """The line number in the file, starting at 1. 0 if the value was not set in the file."""
    place: str
    """The place as the prefix of an error message, such as "file:line" or "--set KEY"."""
    label: str
    """The place as `stagemesh pipeline explain` shows it: "file:line", "variable X" or "override"."""


@dataclass(frozen=True)
class Origins:
    """The origins of the values of a file, by path. The empty path represents the whole file."""

    by_path: Mapping[KeyPath, Origin]

    def get(self, path: KeyPath) -> Origin | None:
        """Returns the origin of the value at exactly this path, or None if the value is a default."""
        return self.by_path.get(path)

    def nearest(self, path: KeyPath) -> Origin:
        """Returns the origin of the value at a path, or of the closest enclosing value that has an origin.

        Skips path elements that are not in the file, such as tags that pydantic inserts.
        """
        reached: KeyPath = ()
        for element in path:
            if (*reached, element) in self.by_path:
                reached = (*reached, element)
        return self.by_path[reached]


def dotted(path: KeyPath) -> str:
    """Formats a path as text, for example "edges.0.connector"."""
    return ".".join(map(str, path))
