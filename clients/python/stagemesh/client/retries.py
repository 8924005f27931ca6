"""The retries of calls: when a client calls again, and for how long it searches for a server that it has lost."""

import time
from dataclasses import dataclass

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, StagemeshError, UnavailableError

# The reason that a stopping server reports. After a request has started, any other error is the end of the request.
_STOPPING = "NOT_RUNNING"
_LONGEST_SEARCH_PAUSE_S = 1.0


@dataclass(frozen=True)
class RetryPolicy:
    """The limits on the retries of a request.

    Before a request runs, the client attempts it at most `attempts` times on each endpoint, and more often while no
    endpoint can be reached and `reach_s` seconds have not passed. The pause before the first retry is `first_pause_s`
    seconds. The pause doubles with each retry, up to `max_pause_s` seconds. If the server asks for another pause
    (RetryInfo), the client waits for that time. The request fails if the server asks for a pause longer than
    `max_asked_pause_s` seconds.

    The server of a running request can stop or become unreachable. The client then searches all endpoints for the
    request for at most `reattach_s` seconds. 0 disables the search. The request fails if its server becomes unavailable
    more than `attempts` times in a row and no new event arrives for `reattach_s` seconds.
    """

    attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    max_asked_pause_s: float = 30.0
    reattach_s: float = 30.0
    reach_s: float = 0.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_pause_s <= 0 or self.max_pause_s < self.first_pause_s:
            raise ValueError(f"a retry policy requires attempts >= 1 and 0 < first_pause_s <= max_pause_s, not {self}")
        for name in ("max_asked_pause_s", "reattach_s", "reach_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")


class Attempts:
    """A counter of the calls that attempt one request, over all endpoints. Decides when the next attempt starts.

    No attempt exceeds the request's timeout.
    """

    def __init__(self, policy: RetryPolicy, *, timeout_s: float | None, endpoints: int = 1) -> None:
        self._policy, self._endpoints = policy, endpoints
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._reach_ends_s = time.monotonic() + policy.reach_s
        self._made = 0
        """The number of attempts since the server last became unavailable, or since the request's start."""
        self.answered = False
        """Whether the server's answer to the current attempt has shown that the request is running."""
        self._search_ends_s: float | None = None
        """The deadline of the search for the request's server, in seconds on the monotonic clock.

        None if the server has never been unavailable while the request was running.
        """
        self._losses = 0
        """The number of times that the server has become unavailable since the last new event."""
        self._last_new_event_s = time.monotonic()

    def begin(self) -> float | None:
        """Starts an attempt. Returns the attempt's timeout in seconds, or None if the request has no timeout.

        Raises DeadlineError if the request's timeout has passed.
        """
        self._made += 1
        self.answered = False
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineError("the timeout passed before the request was sent; increase timeout_s")
        return left_s

    def note_answer(self, *, is_new: bool) -> None:
        """Records that the server has sent an event, and that the request is therefore running.

        `is_new` is True if the caller had not received the event before.
        """
        self.answered = True
        if is_new:
            self._losses, self._last_new_event_s = 0, time.monotonic()

    def begin_search(self) -> None:
        """Starts a search for a server, because the caller continues after it has had no call for a while."""
        self._made, self._search_ends_s = 0, time.monotonic() + self._policy.reattach_s

    def pause_s(self, error: StagemeshError, *, broken: bool = False) -> float | None:
        """Returns the pause in seconds before the next attempt, or None if the request has failed with `error`.

        Until the server has answered the current attempt, the client retries if the server is unreachable or states
        when to retry. After an answer, the client retries only if the connection is `broken` or if the server is
        stopping.
        """
        if self.answered:
            return self._pause_after_loss_s(error, broken=broken)
        searching = self._search_ends_s is not None
        # A server that stops ends calls that it has not accepted yet with CANCELLED.
        unreachable = broken or isinstance(error, UnavailableError)
        if error.retry_after_s is None and not unreachable:
            return None
        may_reach = unreachable and time.monotonic() < self._reach_ends_s
        if not searching and not may_reach and self._made >= self._policy.attempts * self._endpoints:
            return None
        if unreachable and self._made % self._endpoints:
            return self._if_in_time(0.0)
        asked_s = error.retry_after_s
        return self._if_in_time(self._backoff_s(self._made // self._endpoints) if asked_s is None else asked_s)

    def _pause_after_loss_s(self, error: StagemeshError, *, broken: bool) -> float | None:
        """Returns the pause in seconds before a running request is attempted again after its server became unavailable.

        Returns None if the request has failed.
        """
        if not broken and error.reason != _STOPPING:
            return None
        now_s, limit_s = time.monotonic(), self._policy.reattach_s
        self._made = 0
        self._search_ends_s = now_s + limit_s
        self._losses += 1
        exhausted = self._losses > self._policy.attempts and now_s - self._last_new_event_s > limit_s
        if exhausted or not limit_s:
            return None
        if self._losses > 1:
            return self._if_in_time(self._backoff_s(self._losses - 1))
        # Do not wait, because perhaps only the connection broke or another endpoint is ready.
        return self._if_in_time(0.0 if broken or self._endpoints > 1 else error.retry_after_s or 0.0)

    def _backoff_s(self, failures: int) -> float:
        longest_s = self._policy.max_pause_s if self._search_ends_s is None else _LONGEST_SEARCH_PAUSE_S
        return Backoff(first_s=self._policy.first_pause_s, longest_s=longest_s).pause_s(failures)

    def _if_in_time(self, pause_s: float) -> float | None:
        left_s = self._left_s()
        if left_s is not None and pause_s >= left_s:
            return None
        if self._search_ends_s is None:
            return pause_s if pause_s <= self._policy.max_asked_pause_s else None
        return pause_s if time.monotonic() + pause_s <= self._search_ends_s else None

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()
