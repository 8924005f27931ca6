"""${NAME} and ${NAME:-default} in a pipeline file; $${NAME} stands for itself.

References are taken out of the text before YAML reads it and filled in afterwards, scalar by scalar: so they may
stand within {…}, no value can change the file's structure, and those in comments do no harm.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_REFERENCE = re.compile(r"\$(?P<escape>\$?)\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\}")
# Private-use characters, which YAML allows in plain scalars everywhere.
_MARK = re.compile("\ue000(\\d+)\ue001")


class Filled(NamedTuple):
    """A scalar's text with its references filled in."""

    text: str
    names: tuple[str, ...]
    """The variables that the text took its value from."""
    missing: tuple[str, ...]
    """The variables that are not set and have no default."""


class References:
    """The references of one file."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._found: list[re.Match[str]] = []

    def take_out(self, text: str) -> str:
        """The file's text with a mark in the place of each reference."""
        return _REFERENCE.sub(self._mark, text)

    def fill_in(self, text: str) -> Filled:
        """A scalar's text with values in the place of the marks."""
        names: list[str] = []
        missing: list[str] = []

        def value(mark: re.Match[str]) -> str:
            reference = self._found[int(mark[1])]
            if reference["escape"]:
                return reference[0][1:]
            return self._look_up(reference, names=names, missing=missing)

        return Filled(_MARK.sub(value, text), tuple(names), tuple(missing))

    def _mark(self, reference: re.Match[str]) -> str:
        self._found.append(reference)
        return f"\ue000{len(self._found) - 1}\ue001"

    def _look_up(self, reference: re.Match[str], *, names: list[str], missing: list[str]) -> str:
        name, default = reference["name"], reference["default"]
        # As in a shell, an empty variable counts as unset where there is a default.
        if value := self._variables.get(name):
            names.append(name)
            return value
        if default is None and name not in self._variables:
            missing.append(name)
        return default or ""
