"""The one backoff: pauses between attempts that double up to a limit."""


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Returns the pause after `failures` failures in a row: `first_s` after the first, doubled after each further one,
    at most `longest_s`.
    """
    return min(first_s * 2.0 ** min(failures - 1, 32), longest_s)


class Backoff:
    """The pauses of one caller that retries."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._failures = 0

    def next_s(self) -> float:
        """Counts a failure and returns the pause before the next attempt."""
        self._failures += 1
        return backoff_s(self._failures, first_s=self._first_s, longest_s=self._longest_s)

    def reset(self) -> None:
        """Forgets all failures. Call it after a success."""
        self._failures = 0
