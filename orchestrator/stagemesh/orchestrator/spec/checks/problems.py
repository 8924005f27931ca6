"""Collects everything that is wrong with a pipeline file, so that one run reports it all."""

from collections.abc import Collection
from difflib import get_close_matches

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.orchestrator.spec.source.origins import KeyPath, Origins


class Problems:
    """What is wrong, each with its place in the file."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._found: list[tuple[int, str]] = []
        self._paths = set[KeyPath]()

    def add(self, path: KeyPath, text: str) -> None:
        """Notes what is wrong at `path` ("what; remedy")."""
        origin = self._origins.nearest(path)
        self._paths.add(path)
        entry = (origin.line, f"{origin.place}: {text}")
        if entry not in self._found:
            self._found.append(entry)

    @property
    def found(self) -> bool:
        """Whether anything is wrong."""
        return bool(self._found)

    def has(self, path: KeyPath) -> bool:
        """Whether something is wrong at exactly this path."""
        return path in self._paths

    def raise_any(self) -> None:
        """Raises one InvalidPipelineError with a line for each problem, in the file's order, if there is any."""
        if self._found:
            raise InvalidPipelineError("\n".join(text for _, text in sorted(self._found, key=lambda entry: entry[0])))


def suggest(name: str, known: Collection[str]) -> str:
    """The remedy for an unknown name: the closest known one, else all of them."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known)) or 'none'}"
