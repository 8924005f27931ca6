"""When a call may be sent again, and after how long. No clock but the monotonic one, no gRPC."""

import time
from dataclasses import dataclass

from stagemesh.common.backoff import backoff_s
from stagemesh.common.errors import DeadlineError, StagemeshError, UnavailableError

# A server that stops says so; what else it says of a request that has begun is how that ended.
_STOPPING = "NOT_RUNNING"
_LONGEST_SEARCH_PAUSE_S = 1.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and how long in between; the pause doubles each time, up to `max_pause_s`. A server's own wish
    (RetryInfo) goes first; one over `max_asked_pause_s` is not waited for.

    A request that has begun is looked for on every endpoint, for `reattach_s` each time that its server is lost. It is
    given up where nothing new came of it for as long, over more than `attempts` servers or connections. 0: at once.
    """

    attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    max_asked_pause_s: float = 30.0
    reattach_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_pause_s <= 0 or self.max_pause_s < self.first_pause_s:
            raise ValueError(f"a retry policy needs attempts >= 1 and 0 < first_pause_s <= max_pause_s, not {self}")
        for name in ("max_asked_pause_s", "reattach_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


class Attempts:
    """The tries at one request, within its time, on one or more endpoints in turn."""

    def __init__(self, policy: RetryPolicy, *, timeout_s: float | None, endpoints: int = 1) -> None:
        self._policy, self._endpoints = policy, endpoints
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._made = 0
        """Since the request was lost, or, until it has begun, in all."""
        self._answered = False
        """Whether the try at hand has shown that the request runs."""
        self._search_ends_s: float | None = None
        """Set once the request has begun and was lost."""
        self._fruitless = 0
        """How often it was lost since anything new came of it, which was at this time:"""
        self._news_s = time.monotonic()

    def begin(self) -> float | None:
        """Counts a try; the seconds it may take. Raises DeadlineError when none are left."""
        self._made += 1
        self._answered = False
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineError("the time allowed was over before the request was sent; allow more with timeout_s")
        return left_s

    def note_answer(self, *, is_new: bool) -> None:
        """The request runs, as this try has shown; `is_new` where that is something that the caller did not know."""
        self._answered = True
        if is_new:
            self._fruitless, self._news_s = 0, time.monotonic()

    def pause_s(self, error: StagemeshError, *, broken: bool = False) -> float | None:
        """How long to wait before the next try after `error`; None where another is of no use.

        Worth another try is a server that is out of reach, and any error for which the server names a time. Once a try
        has shown that the request runs, it is only a connection that is `broken`, and a server that stops.
        """
        if self._answered:
            return self._lose(error, broken=broken)
        searching = self._search_ends_s is not None
        leads_elsewhere = isinstance(error, UnavailableError) or (broken and searching)
        if error.retry_after_s is None and not leads_elsewhere:
            return None
        if not searching and self._made >= self._policy.attempts * self._endpoints:
            return None
        if leads_elsewhere and self._made % self._endpoints:
            return self._in_time(0.0)
        asked_s = error.retry_after_s
        return self._in_time(self._usual_pause_s(self._made // self._endpoints) if asked_s is None else asked_s)

    def _lose(self, error: StagemeshError, *, broken: bool) -> float | None:
        """The request began and its server is lost, or it failed."""
        if not broken and error.reason != _STOPPING:
            return None
        now_s, patience_s = time.monotonic(), self._policy.reattach_s
        self._made = 0
        self._search_ends_s = now_s + patience_s
        self._fruitless += 1
        hopeless = self._fruitless > self._policy.attempts and now_s - self._news_s > patience_s
        if hopeless or not patience_s:
            return None
        if self._fruitless > 1:
            return self._in_time(self._usual_pause_s(self._fruitless - 1))
        # A connection may have been all that broke, and another server is ready.
        return self._in_time(0.0 if broken or self._endpoints > 1 else error.retry_after_s or 0.0)

    def _usual_pause_s(self, failures: int) -> float:
        longest_s = self._policy.max_pause_s if self._search_ends_s is None else _LONGEST_SEARCH_PAUSE_S
        return backoff_s(failures, first_s=self._policy.first_pause_s, longest_s=longest_s)

    def _in_time(self, pause_s: float) -> float | None:
        left_s = self._left_s()
        if left_s is not None and pause_s >= left_s:
            return None
        if self._search_ends_s is None:
            return pause_s if pause_s <= self._policy.max_asked_pause_s else None
        return pause_s if time.monotonic() + pause_s <= self._search_ends_s else None

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()
