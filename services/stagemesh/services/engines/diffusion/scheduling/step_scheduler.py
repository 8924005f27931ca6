"""Whose step is next, and who shares it. Knows nothing of models."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_arrivals = itertools.count()


@dataclass(eq=False)
class Turn:
    """A request that waits for its next step, or is in it."""

    request_id: str
    key: Hashable
    """Requests with the same key can share a step."""
    tokens: int
    """What it brings to a forward."""
    steps_left: int
    priority: int = 0
    """Higher goes first."""
    deadline_s: float | None = None
    """When it must be done, by the clock of `StepScheduler.next_batch`; None for any time."""
    waited: int = 0
    """Steps of others since its own last."""
    arrival: int = field(default_factory=lambda: next(_arrivals))


class StepScheduler:
    """Shortest first, by priority, and nobody waits for ever.

    The request with the fewest steps left goes first among those of the highest priority: short ones are soon done, and
    cost the long ones little. One that has waited for `max_wait_steps` steps, or would miss its deadline, goes before
    all of them. Those of about its size that can share its step join it, as far as that pays: rows of a forward are
    filled up to the longest.
    """

    def __init__(self, *, max_wait_steps: int, max_batch: int) -> None:
        self.step_s = 0.0
        """What a step has taken lately."""
        self._max_wait_steps = max_wait_steps
        self._sizes = BatchSizes(max_batch)
        self._turns: set[Turn] = set()

    def add(self, turn: Turn) -> None:
        """It waits for a step from now on."""
        turn.waited = 0
        self._turns.add(turn)

    def remove(self, turn: Turn) -> None:
        """It waits no more; nothing if it did not."""
        self._turns.discard(turn)

    def next_batch(self, now_s: float) -> list[Turn]:
        """Who is in the next step; empty where nobody waits. They wait on, for the step after it."""
        ordered = sorted(self._turns, key=lambda turn: self._rank(turn, now_s))
        if not ordered:
            return []
        first = ordered[0]
        alike = [turn for turn in ordered if _can_join(turn, first)]
        batch = alike[: self._sizes.size(self._measured(first), len(alike))]
        for turn in ordered:
            turn.waited = 0 if turn in batch else turn.waited + 1
        return batch

    def done(self, batch: Sequence[Turn], seconds: float) -> None:
        """A step was made; learns from what it took."""
        self._sizes.note(self._measured(batch[0]), len(batch), seconds)
        self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds
        for turn in batch:
            turn.steps_left -= 1

    def work_s(self) -> float:
        """About what is left to do for those who wait, in seconds."""
        return self.step_s * sum(turn.steps_left for turn in self._turns)

    # -- inner workings

    def _rank(self, turn: Turn, now_s: float) -> tuple[object, ...]:
        late = turn.deadline_s is not None and now_s + (turn.steps_left + 1) * self.step_s >= turn.deadline_s
        overdue = turn.waited >= self._max_wait_steps
        return (not overdue, -turn.waited if overdue else 0, not late, -turn.priority, turn.steps_left, turn.arrival)

    @staticmethod
    def _measured(turn: Turn) -> Hashable:
        """Steps of about the same size take about the same time."""
        return (turn.key, turn.tokens.bit_length())


class BatchSizes:
    """How many rows a forward should have: as many as make each of them cheaper, by what steps have taken.

    A size is tried once the next smaller one has been, and more than once, as a step may be slow by chance; the best of
    the last few times stands for it.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._times: OrderedDict[Hashable, dict[int, deque[float]]] = OrderedDict()

    def __len__(self) -> int:
        """Of how many kinds of steps it knows what they take."""
        return len(self._times)

    def size(self, key: Hashable, available: int) -> int:
        """At most `available`."""
        times, best = self._times.get(key, {}), 1
        limit = min(available, self._max_batch)
        for size in range(1, limit + 1):
            if len(times.get(size, ())) < _TRIED:
                return size
            if self._row_s(times, size) < _WORTHWHILE * self._row_s(times, best):
                best = size
        return best

    def note(self, key: Hashable, size: int, seconds: float) -> None:
        """A step with so many rows took so long."""
        self._times.setdefault(key, {}).setdefault(size, deque(maxlen=_REMEMBERED)).append(seconds)
        self._times.move_to_end(key)
        if len(self._times) > _KINDS:
            self._times.popitem(last=False)

    @staticmethod
    def _row_s(times: dict[int, deque[float]], size: int) -> float:
        return min(times[size]) / size


def _can_join(turn: Turn, first: Turn) -> bool:
    alike = turn.key == first.key and max(turn.tokens, first.tokens) <= _ALIKE * min(turn.tokens, first.tokens)
    return alike and turn.steps_left <= _LONGER * first.steps_left


_ALIKE = 2
"""Times as many tokens."""
_LONGER = 3
"""Times as many steps."""
_WORTHWHILE = 0.97
_TRIED = 2
_REMEMBERED = 16
_KINDS = 1024
