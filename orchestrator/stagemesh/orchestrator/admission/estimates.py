"""What requests took and made so far, as far as it tells of those to come."""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

_FIRST_GUESS_S = 1.0
_WINDOW = 50
_MOST_KINDS = 256
_SAMPLES = 32
_ENOUGH_SAMPLES = 8
_SAMPLE_LIFE_S = 60.0


class Mean:
    """The mean of the first values; of more than fifty, later ones count more than earlier ones."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._count = 0

    @property
    def is_guess(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._count

    def add(self, value: float) -> None:
        """One more value."""
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
    """Measured by request's kind, of which the last 256 are remembered, and over all."""

    def __init__(self) -> None:
        self._took_s = Mean(_FIRST_GUESS_S)
        self._made_bytes = Mean(0.0)
        self._kinds = OrderedDict[Hashable, _Kind]()

    @property
    def mean_s(self) -> float:
        """How long requests hold their places, on average over all of them; 1 s until one has ended."""
        return self._took_s.value

    @property
    def has_mean(self) -> bool:
        """Whether one has ended."""
        return not self._took_s.is_guess

    def made_bytes(self, kind: Hashable) -> int:
        """What a request of this kind makes, on average; where none has ended, what any makes."""
        known = self._kinds.get(kind)
        made = self._made_bytes if known is None or known.made_bytes.is_guess else known.made_bytes
        return int(made.value)

    def fastest_s(self, kind: Hashable, now_s: float) -> float:
        """The least that one of the last 32 of this kind took; 0 where fewer than eight are known.

        Those of more than a minute ago do not count: where they had all requests refused, nothing would ever show that
        it goes faster now.
        """
        known = self._kinds.get(kind)
        if known is None:
            return 0.0
        while known.samples and known.samples[0].ended_s < now_s - _SAMPLE_LIFE_S:
            known.samples.popleft()
        return min(sample.took_s for sample in known.samples) if len(known.samples) >= _ENOUGH_SAMPLES else 0.0

    def add_end(self, took_s: float) -> None:
        """A request has given its place back, whatever came of it."""
        self._took_s.add(took_s)

    def add_success(self, kind: Hashable, now_s: float, *, took_s: float, made_bytes: int) -> None:
        """A request has come to its good end."""
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        known.samples.append(_Sample(now_s, took_s))
        known.made_bytes.add(made_bytes)
        self._made_bytes.add(made_bytes)
