"""Estimates of request durations and output sizes from earlier requests, and retry times of rejected requests."""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

_FIRST_GUESS_S = 1.0
_WINDOW = 50
_MAX_KINDS = 256
_SAMPLES = 32
_ENOUGH_SAMPLES = 8
_SAMPLE_LIFETIME_S = 60.0

_EARLY_S = 0.02
_GRACE_S = 1.0
_MAX_SLOTS = 10_000
_MIN_DELAY_S = 0.1
_SMOOTHING = 0.05
# A request that returns slightly late waits slightly longer. A request that returns too early must return again.
_MARGIN = 1.1
_MAX_RETRY_INTERVALS = 8
_MIN_RETURNING = 0.05


class Mean:
    """The mean of the added values. After 50 values, a moving average in which each new value has the weight 1/50."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._count = 0

    @property
    def is_guess(self) -> bool:
        """Whether no value was added yet, so that `value` is the initial guess."""
        return not self._count

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _WINDOW)
        self.value += (value - self.value) / self._count


class _Sample(NamedTuple):
    ended_s: float
    took_s: float


@dataclass
class _Kind:
    made_bytes: Mean = field(default_factory=lambda: Mean(0.0))
    samples: deque[_Sample] = field(default_factory=lambda: deque[_Sample](maxlen=_SAMPLES))


class RequestEstimates:
    """Estimates of durations and output sizes, for all requests and for each of the 256 most recent kinds."""

    def __init__(self) -> None:
        self.duration_s = Mean(_FIRST_GUESS_S)
        """The mean duration of all requests in seconds, including failed requests. The initial guess is 1 s."""
        self._made_bytes = Mean(0.0)
        self._kinds = OrderedDict[Hashable, _Kind]()

    def made_bytes(self, kind: Hashable) -> int:
        """Returns the mean output size of requests of this kind, in bytes.

        If no request of this kind has succeeded, returns the mean output size of all successful requests.
        """
        known = self._kinds.get(kind)
        made = self._made_bytes if known is None or known.made_bytes.is_guess else known.made_bytes
        return int(made.value)

    def fastest_s(self, kind: Hashable, now_s: float) -> float:
        """Returns the shortest duration among the last 32 successful requests of this kind, in seconds.

        Returns 0 if fewer than 8 of these requests ended within the last minute. Without this time limit, old durations
        could cause all requests to be rejected, and no request would show that the pipeline has become faster.
        """
        known = self._kinds.get(kind)
        if known is None:
            return 0.0
        while known.samples and known.samples[0].ended_s < now_s - _SAMPLE_LIFETIME_S:
            known.samples.popleft()
        return min(sample.took_s for sample in known.samples) if len(known.samples) >= _ENOUGH_SAMPLES else 0.0

    def add_success(self, kind: Hashable, now_s: float, *, took_s: float, made_bytes: int) -> None:
        """Adds the duration `took_s` in seconds and the output size `made_bytes` of a successful request.

        `now_s` is the time at which the request ended, in seconds.
        """
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        known.samples.append(_Sample(now_s, took_s))
        known.made_bytes.add(made_bytes)
        self._made_bytes.add(made_bytes)


class RetrySchedule:
    """Assigns retry times to rejected requests, at the rate at which running requests end.

    A request that is sent again at its retry time, or at most one second later, precedes new requests. Because not all
    requests are sent again, the interval between retry times is multiplied by the fraction of requests that were sent
    again so far. At most 10,000 requests have their own retry time. Further requests share the last retry time.
    """

    def __init__(self) -> None:
        self._future = OrderedDict[str, float]()
        """The retry times in the future, in seconds, by `AdmissionRequest.retry_key`. The earliest time is first."""
        self._due = OrderedDict[str, float]()
        """The retry times that have been reached but have not expired, in seconds, by `AdmissionRequest.retry_key`."""
        self._last_s = 0.0
        self._returning = 1.0

    def __len__(self) -> int:
        return len(self._future) + len(self._due)

    def is_due(self, key: str, now_s: float) -> bool:
        """Returns whether the request's retry time has been reached and has not expired."""
        self._update(now_s)
        return key in self._due

    def remove(self, key: str) -> None:
        """Removes the retry time of a request that was admitted or queued. Does nothing if the request has none."""
        if self._due.pop(key, None) is not None:
            self._learn(1.0)
        self._future.pop(key, None)

    def assign(self, key: str, now_s: float, *, interval_s: float) -> float:
        """Assigns a retry time to a rejected request. Returns the delay until this time in seconds.

        `interval_s` is the average time in seconds between the ends of two running requests.
        """
        if self.is_due(key, now_s):
            # The slot was too early. The request remains due, so that it precedes new requests.
            del self._due[key]
            delay_s = max(_MIN_DELAY_S, min(len(self._due) + 1, _MAX_RETRY_INTERVALS) * interval_s)
            self._due[key] = now_s + delay_s
            return delay_s
        if key in self._future:
            return max(_MIN_DELAY_S, self._future[key] - now_s)
        if len(self._future) >= _MAX_SLOTS:
            # The schedule must not grow, because a slot is removed only after its time.
            return max(_MIN_DELAY_S, self._last_s - now_s)
        interval_s *= _MARGIN
        ahead, last_s = len(self) * self._returning, max(self._last_s, now_s)
        step_s = interval_s * self._returning
        # The measured interval varies. Slots must nevertheless stay in order and close to the last slot.
        ideal_s = now_s + (ahead + 1) * interval_s
        self._last_s = min(max(ideal_s, last_s + step_s / 2), last_s + max(_MIN_DELAY_S, 2 * step_s))
        self._future[key] = self._last_s
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
