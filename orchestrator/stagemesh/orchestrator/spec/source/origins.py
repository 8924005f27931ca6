"""Where each value of a pipeline file came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the top of the file down to a value."""


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    line: int
    """From 1; 0 for what did not come from the file."""
    place: str
    """What an error begins with: "file:line", or "--set KEY"."""
    label: str
    """What `pipeline explain` shows: "file:line", "variable X" or "override"."""


@dataclass(frozen=True)
class Origins:
    """The origins of a file's values by path; the empty path is the file as a whole."""

    by_path: Mapping[KeyPath, Origin]

    def get(self, path: KeyPath) -> Origin | None:
        """The origin of exactly this value; None for a default."""
        return self.by_path.get(path)

    def nearest(self, path: KeyPath) -> Origin:
        """The origin of the value, or of the closest thing around it that has one.

        Path elements that the file does not have in the middle (a validator's own tags) are stepped over.
        """
        reached: KeyPath = ()
        for element in path:
            if (*reached, element) in self.by_path:
                reached = (*reached, element)
        return self.by_path[reached]


def dotted(path: KeyPath) -> str:
    """A path as people write it: edges.0.connector."""
    return ".".join(map(str, path))
