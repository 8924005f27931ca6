"""Replaces references to variables in a pipeline file: ${NAME} and ${NAME:-default}. $${NAME} is the text "${NAME}".

References are replaced by marks before the text is parsed as YAML. The marks in each scalar are replaced by values
afterwards. Therefore references may be used within {…}, no value can change the structure of the file, and references
in comments have no effect.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_REFERENCE = re.compile(r"\$(?P<escape>\$?)\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\}")
# YAML allows private-use characters everywhere in plain scalars.
_MARK = re.compile("\ue000(\\d+)\ue001")


class Filled(NamedTuple):
    """The text of a YAML scalar after its references were replaced by values."""

    text: str
    names: tuple[str, ...]
    """The names of the variables whose values the text contains."""
    missing: tuple[str, ...]
    """The names of the variables that are not set and for which the reference has no default."""


class References:
    """Replaces the references to variables in one file. `variables` contains the values by name."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._found: list[re.Match[str]] = []

    def take_out(self, text: str) -> str:
        """Replaces each reference in the file's text by a mark, and returns the new text."""
        return _REFERENCE.sub(self._mark, text)

    def fill_in(self, text: str) -> Filled:
        """Replaces the marks in a YAML scalar by the values of the variables."""
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
