"""The keys of a vLLM-Omni config that its import does not convert, each with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """The consequence of a key that is not converted. The order is that of the report."""

    MISSING = "missing"
    """No valid pipeline can be written without it."""
    NOT_CARRIED = "not carried over"
    """The pipeline is valid, but behaves differently or is slower until the remedy has been applied."""
    NOT_NEEDED = "not needed"
    """The key has no effect in Stagemesh, or describes what Stagemesh always does."""


class Item(NamedTuple):
    """A key of the config that is not converted."""

    outcome: Outcome
    path: str
    """The path of the key in the config, for example "stage_args[1].engine_args.worker_cls"."""
    text: str
    """The reason, and after a semicolon the remedy, if there is one."""


@dataclass
class Report:
    """The items of an import, at most one for each path."""

    _items: dict[str, Item] = field(default_factory=dict[str, Item])

    def add(self, outcome: Outcome, path: str, text: str) -> None:
        """Adds an item. Ignores a path that was already reported."""
        self._items.setdefault(path, Item(outcome, path, text))

    def items(self, outcome: Outcome) -> Sequence[Item]:
        """Returns the items with an outcome, in the order in which they were added."""
        return [item for item in self._items.values() if item.outcome is outcome]
