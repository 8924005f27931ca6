"""Exponential backoff. The pause before a retry doubles with each consecutive failure, up to a maximum."""

from dataclasses import dataclass, field


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Returns the pause in seconds after `failures` consecutive failures.

    The pause is `first_s` after the first failure and doubles with each further failure, up to `longest_s`.
    """
    return min(first_s * 2.0 ** min(failures - 1, 32), longest_s)


@dataclass(kw_only=True)
class Backoff:
    """A counter of the consecutive failures of one operation. Determines the pause before each retry."""

    first_s: float
    longest_s: float
    _failures: int = field(default=0, init=False)

    def next_s(self) -> float:
        """Records a failure. Returns the pause in seconds before the next attempt."""
        self._failures += 1
        return backoff_s(self._failures, first_s=self.first_s, longest_s=self.longest_s)

    def reset(self) -> None:
        """Resets the number of consecutive failures to 0. Call it after a success."""
        self._failures = 0
