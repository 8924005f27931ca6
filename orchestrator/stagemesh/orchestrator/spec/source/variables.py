"""References to variables in a pipeline file: ${NAME} and ${NAME:-default}. $${NAME} stands for the text "${NAME}".

References are replaced by marks before YAML reads the text, and each scalar is filled in afterwards. Therefore
references may stand within {…}, no value can change the file's structure, and references in comments have no effect.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_REFERENCE = re.compile(r"\$(?P<escape>\$?)\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\}")
# YAML allows private-use characters everywhere in plain scalars.
_MARK = re.compile("\ue000(\\d+)\ue001")


class Filled(NamedTuple):
    """The text of a scalar in which references are replaced by values."""

    text: str
    names: tuple[str, ...]
    """The variables whose values the text contains."""
    missing: tuple[str, ...]
    """The variables that are not set and have no default in the text."""


class References:
    """The references to variables in one file."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._found: list[re.Match[str]] = []

    def take_out(self, text: str) -> str:
        """Returns the file's text with a mark instead of each reference."""
        return _REFERENCE.sub(self._mark, text)

    def fill_in(self, text: str) -> Filled:
        """Returns a scalar's text with values instead of marks."""
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
        # As in a shell, an empty variable counts as unset if the reference has a default.
        if value := self._variables.get(name):
            names.append(name)
            return value
        if default is None and name not in self._variables:
            missing.append(name)
        return default or ""
