"""Collects the errors in a pipeline file, so that all of them are reported at once."""

from collections.abc import Collection
from difflib import get_close_matches

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.orchestrator.spec.source.origins import KeyPath, Origins


class Problems:
    """The errors found so far in a pipeline file, each with its line."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._found: list[tuple[int, str]] = []
        self._paths = set[KeyPath]()

    def add(self, path: KeyPath, text: str) -> None:
        """Adds an error in the value at `path`, unless it was already added. `text` has the form "error; remedy"."""
        origin = self._origins.nearest(path)
        self._paths.add(path)
        entry = (origin.line, f"{origin.place}: {text}")
        if entry not in self._found:
            self._found.append(entry)

    @property
    def found(self) -> bool:
        """Whether any error was added."""
        return bool(self._found)

    def has(self, path: KeyPath) -> bool:
        """Returns whether an error was added for exactly this path."""
        return path in self._paths

    def raise_any(self) -> None:
        """Raises InvalidPipelineError if any error was added.

        The message has one line for each error, in the file's order.
        """
        if self._found:
            raise InvalidPipelineError("\n".join(text for _, text in sorted(self._found, key=lambda entry: entry[0])))


def suggest(name: str, known: Collection[str]) -> str:
    """Returns a remedy for an unknown name: the most similar known name, or all known names if no name is similar."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known)) or 'none'}"
