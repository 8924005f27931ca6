"""The file and line of every value of a pipeline file, and the problems that are reported at these lines."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

from stagemesh.common.errors import Finding, InvalidPipelineError

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and list indexes that lead from the root of the file to a value."""


@dataclass(frozen=True)
class Origin:
    """The place where a value of the pipeline was set, for error messages and for `stagemesh pipeline explain`."""

    line: int
    """The line number in the file, starting at 1. 0 if the value was not set in the file."""
    place: str
    """The place as the prefix of an error message, such as "file:line" or "--set KEY"."""
    label: str
    """The place as `stagemesh pipeline explain` shows it: "file:line", "variable X" or "override"."""


class Problems:
    """The errors found so far in a pipeline file, each with its line."""

    def __init__(self, origins: dict[KeyPath, Origin]) -> None:
        self.origins = origins
        """The origin of each value, by path. The empty path means the whole file. Default values have no origin."""
        self._found: list[Finding] = []
        self._paths = set[KeyPath]()

    def add(self, path: KeyPath, text: str) -> None:
        """Adds an error in the value at `path`. Ignores an error that was already added.

        `text` has the form "error; remedy".
        """
        origin = self._nearest_origin(path)
        self._paths.add(path)
        known = {(finding.place, finding.message) for finding in self._found}
        if (origin.place, text) not in known:
            self._found.append(Finding(origin.place, origin.line, dotted(path), text))

    def has(self, path: KeyPath) -> bool:
        """Returns whether an error was added for exactly this path, not for a value above or below it."""
        return path in self._paths

    def raise_any(self) -> None:
        """Raises InvalidPipelineError if any error was added.

        The message has one line for each error, in ascending order of the line numbers in the file.
        """
        if self._found:
            raise _invalid(sorted(self._found, key=lambda finding: finding.line))

    def _nearest_origin(self, path: KeyPath) -> Origin:
        """Returns the origin of the value at a path, or of the closest enclosing value that has an origin.

        Skips elements of the path that are not in the file, such as tags that pydantic inserts.
        """
        reached: KeyPath = ()
        for element in path:
            if (*reached, element) in self.origins:
                reached = (*reached, element)
        return self.origins[reached]


def invalid_line(file: str, line: int, text: str) -> InvalidPipelineError:
    """Returns the error for a file that cannot be parsed beyond a line. `text` has the form "error; remedy"."""
    return _invalid([Finding(f"{file}:{line}", line, "", text)])


def _invalid(findings: Sequence[Finding]) -> InvalidPipelineError:
    error = InvalidPipelineError("\n".join(f"{finding.place}: {finding.message}" for finding in findings))
    error.findings = findings
    return error


def suggest(name: str, known: Collection[str]) -> str:
    """Returns a remedy for an unknown name: the most similar name in `known`.

    If no name in `known` is similar, the remedy lists all of them.
    """
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def dotted(path: KeyPath) -> str:
    """Formats a path as a dotted key, for example "edges.0.connector"."""
    return ".".join(map(str, path))
