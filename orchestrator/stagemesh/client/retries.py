"""When a call may be sent again, and after how long. No clock but the monotonic one, no gRPC."""

import time
from dataclasses import dataclass

from stagemesh.connectors.errors import DeadlineError, StagemeshError, UnavailableError


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and how long in between; the pause doubles each time. A server's own wish (RetryInfo) goes first."""

    attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_pause_s <= 0 or self.max_pause_s < self.first_pause_s:
            raise ValueError(f"a retry policy needs attempts >= 1 and 0 < first_pause_s <= max_pause_s, not {self}")


class Attempts:
    """The tries at one call, within its time."""

    def __init__(self, policy: RetryPolicy, *, timeout_s: float | None) -> None:
        self._policy = policy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._made = 0

    def begin(self) -> float | None:
        """Counts a try; the seconds it may take. Raises DeadlineError when none are left."""
        self._made += 1
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineError("the time allowed was over before the request was sent; allow more with timeout_s")
        return left_s

    def pause_s(self, error: StagemeshError) -> float | None:
        """How long to wait before the next try after `error`; None where another is of no use.

        Worth another try is a server that is out of reach, and any error for which the server names a time.
        """
        asked_s = error.retry_after_s
        if self._made >= self._policy.attempts or (asked_s is None and not isinstance(error, UnavailableError)):
            return None
        pause_s = self._usual_pause_s() if asked_s is None else asked_s
        left_s = self._left_s()
        too_long = pause_s > self._policy.max_pause_s or (left_s is not None and pause_s >= left_s)
        return None if too_long else pause_s

    def _usual_pause_s(self) -> float:
        return min(self._policy.first_pause_s * 2.0 ** (self._made - 1), self._policy.max_pause_s)

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()
