"""Estimates the durations and output sizes of requests from those of earlier requests."""

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
    """Estimates for requests of the same kind, for the 256 most recent kinds, and for all requests together."""

    def __init__(self) -> None:
        self.duration_s = Mean(_FIRST_GUESS_S)
        """The mean duration in seconds of all requests, including failed requests. The initial guess is 1 s."""
        self._made_bytes = Mean(0.0)
        self._kinds = OrderedDict[Hashable, _Kind]()

    def made_bytes(self, kind: Hashable) -> int:
        """Returns the mean output size in bytes of requests of this kind.

        If none has succeeded, returns that of all requests.
        """
        known = self._kinds.get(kind)
        made = self._made_bytes if known is None or known.made_bytes.is_guess else known.made_bytes
        return int(made.value)

    def fastest_s(self, kind: Hashable, now_s: float) -> float:
        """Returns the shortest duration in seconds among the last 32 successful requests of this kind.

        Returns 0 if fewer than 8 of them ended within the last minute. Without this expiry, old durations could cause
        all requests to be rejected, and no request would show that the pipeline has become faster.
        """
        known = self._kinds.get(kind)
        if known is None:
            return 0.0
        while known.samples and known.samples[0].ended_s < now_s - _SAMPLE_LIFETIME_S:
            known.samples.popleft()
        return min(sample.took_s for sample in known.samples) if len(known.samples) >= _ENOUGH_SAMPLES else 0.0

    def add_success(self, kind: Hashable, now_s: float, *, took_s: float, made_bytes: int) -> None:
        """Adds the duration and the output size of a successful request."""
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        known.samples.append(_Sample(now_s, took_s))
        known.made_bytes.add(made_bytes)
        self._made_bytes.add(made_bytes)
