"""Assigns retry times to rejected requests, so that a queue slot is free when a request is sent again."""

from collections import OrderedDict

_EARLY_S = 0.02
_GRACE_S = 1.0
_MAX_SLOTS = 10_000
_MIN_DELAY_S = 0.1
_SMOOTHING = 0.05
# A request that returns slightly late waits slightly longer. A request that returns too early must return again.
_MARGIN = 1.1
_MAX_RETRY_INTERVALS = 8
_MIN_RETURNING = 0.05


class RetrySchedule:
    """Assigns retry times at the rate at which running requests end.

    A request that is sent again at its retry time, or at most one second later, precedes new requests. Because not all
    requests are sent again, the interval between retry times is multiplied by the fraction of requests that were sent
    again so far. At most 10,000 requests have their own retry time. Further requests are assigned the last retry time.
    """

    def __init__(self) -> None:
        self._future = OrderedDict[str, float]()
        """The retry times in the future, by request id. The earliest time is first."""
        self._due = OrderedDict[str, float]()
        """The retry times that have been reached, by request id. These requests may be sent again at any moment."""
        self._last_s = 0.0
        self._returning = 1.0

    def __len__(self) -> int:
        return len(self._future) + len(self._due)

    def is_due(self, request_id: str, now_s: float) -> bool:
        """Returns whether the request's retry time has been reached and has not expired."""
        self._update(now_s)
        return request_id in self._due

    def remove(self, request_id: str) -> None:
        """Removes the retry time of a request that was admitted or queued. Does nothing if the request has none."""
        if self._due.pop(request_id, None) is not None:
            self._learn(1.0)
        self._future.pop(request_id, None)

    def assign(self, request_id: str, now_s: float, *, interval_s: float) -> float:
        """Assigns a retry time to a rejected request. Returns the delay in seconds until this time.

        `interval_s` is the average time in seconds between the ends of two running requests.
        """
        if self.is_due(request_id, now_s):
            # The slot was too early. The request remains due, so that it precedes new requests.
            del self._due[request_id]
            delay_s = max(_MIN_DELAY_S, min(len(self._due) + 1, _MAX_RETRY_INTERVALS) * interval_s)
            self._due[request_id] = now_s + delay_s
            return delay_s
        if request_id in self._future:
            return max(_MIN_DELAY_S, self._future[request_id] - now_s)
        if len(self._future) >= _MAX_SLOTS:
            # The schedule must not grow, because a slot is removed only after its time.
            return max(_MIN_DELAY_S, self._last_s - now_s)
        interval_s *= _MARGIN
        ahead, last_s = len(self) * self._returning, max(self._last_s, now_s)
        step_s = interval_s * self._returning
        # The measured interval varies. Slots must nevertheless stay in order and close to the last slot.
        ideal_s = now_s + (ahead + 1) * interval_s
        self._last_s = min(max(ideal_s, last_s + step_s / 2), last_s + max(_MIN_DELAY_S, 2 * step_s))
        self._future[request_id] = self._last_s
        return self._last_s - now_s

    def _update(self, now_s: float) -> None:
        while self._future and (first := next(iter(self._future.items())))[1] <= now_s + _EARLY_S:
            del self._future[first[0]]
            self._due[first[0]] = first[1]
        while self._due and next(iter(self._due.values())) + _GRACE_S < now_s:
            self._due.popitem(last=False)
            self._learn(0.0)

    def _learn(self, returned: float) -> None:
        self._returning += _SMOOTHING * (max(returned, _MIN_RETURNING) - self._returning)
