"""Exponential backoff. The pause before a retry doubles with each consecutive failure, up to a maximum."""

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """The pauses between the attempts of an operation. A loop states them as a constant, and counts with `retries`."""

    first_s: float
    """The pause after the first failure, in seconds. The pause doubles with each further consecutive failure."""
    longest_s: float
    """The longest pause in seconds."""

    def pause_s(self, failures: int) -> float:
        """Returns the pause in seconds after `failures` consecutive failures."""
        return min(self.first_s * 2.0 ** min(failures - 1, 32), self.longest_s)

    def retries(self) -> "Retries":
        """Returns a new counter, which determines the pause before each retry of one operation."""
        return Retries(self)


@dataclass
class Retries:
    """A counter of the consecutive failures of one operation."""

    backoff: Backoff
    _failures: int = field(default=0, init=False)

    def next_s(self) -> float:
        """Records a failure. Returns the pause in seconds before the next attempt."""
        self._failures += 1
        return self.backoff.pause_s(self._failures)

    async def sleep(self) -> None:
        """Records a failure, and pauses before the next attempt."""
        await asyncio.sleep(self.next_s())

    def reset(self) -> None:
        """Resets the number of consecutive failures to 0. Call it after a success."""
        self._failures = 0
