"""When those who were refused are to come back, so that each finds the place that it was told of."""

from collections import OrderedDict

_EARLY_S = 0.02
_GRACE_S = 1.0
_MOST = 10_000
_LEAST_S = 0.1
_SMOOTHING = 0.05
# Who comes a little late waits a little longer; who comes too early has to come again.
_MARGIN = 1.1
_SOON = 8
_FEWEST_RETURN = 0.05


class RetrySchedule:
    """A line of those who were told when to come back: places are promised one after another, as they become free.

    Who comes at the promised time, or within a second after, goes before newcomers. As not all come back, promises lie
    closer together, by as much as experience says. At most 10,000 are promised a place; who is beyond comes after them.
    """

    def __init__(self) -> None:
        self._promised = OrderedDict[str, float]()
        """Times by request id, the earliest first: those to come."""
        self._due = OrderedDict[str, float]()
        """The same for those whose time has come, and who may arrive any moment."""
        self._last_s = 0.0
        self._returning = 1.0

    def __len__(self) -> int:
        return len(self._promised) + len(self._due)

    def due(self, now_s: float) -> int:
        """How many places are promised to who may arrive any moment."""
        while self._promised and (first := next(iter(self._promised.items())))[1] <= now_s + _EARLY_S:
            del self._promised[first[0]]
            self._due[first[0]] = first[1]
        while self._due and next(iter(self._due.values())) + _GRACE_S < now_s:
            self._due.popitem(last=False)
            self._learn(0.0)
        return len(self._due)

    def is_due(self, request_id: str, now_s: float) -> bool:
        """Whether a place is promised to this request now."""
        return bool(self.due(now_s)) and request_id in self._due

    def keep(self, request_id: str) -> None:
        """The request has got its place."""
        if self._due.pop(request_id, None) is not None:
            self._learn(1.0)
        self._promised.pop(request_id, None)

    def promise(self, request_id: str, now_s: float, *, interval_s: float) -> float:
        """In how many seconds to come back, where a place becomes free every `interval_s`."""
        if self.is_due(request_id, now_s):
            # The promise was too early: it stays the next one to be kept.
            del self._due[request_id]
            again_s = max(_LEAST_S, min(len(self._due) + 1, _SOON) * interval_s)
            self._due[request_id] = now_s + again_s
            return again_s
        if request_id in self._promised:
            return max(_LEAST_S, self._promised[request_id] - now_s)
        if len(self._promised) >= _MOST:
            # Nor does the line get longer: it would for as long as these take, even where nobody comes back.
            return max(_LEAST_S, self._last_s - now_s)
        interval_s *= _MARGIN
        ahead, last_s = len(self) * self._returning, max(self._last_s, now_s)
        step_s = interval_s * self._returning
        # As the line says, and yet one after another: the interval is measured, and goes up and down.
        ideal_s = now_s + (ahead + 1) * interval_s
        self._last_s = min(max(ideal_s, last_s + step_s / 2), last_s + max(_LEAST_S, 2 * step_s))
        self._promised[request_id] = self._last_s
        return self._last_s - now_s

    def _learn(self, came: float) -> None:
        self._returning += _SMOOTHING * (max(came, _FEWEST_RETURN) - self._returning)
