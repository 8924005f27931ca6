"""Selects the requests that run their next denoising step together. Independent of models and of asyncio."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_arrivals = itertools.count()


@dataclass(eq=False)
class Turn:
    """Scheduling data of a request that waits for its next step or runs a step."""

    request_id: str
    key: Hashable
    """Compatibility key. Only requests with equal keys can share a step."""
    tokens: int
    """Number of tokens that the request adds to a forward pass."""
    steps_left: int
    priority: int = 0
    """Priority of the request. Requests with a higher number run first."""
    deadline_s: float | None = None
    """Deadline in seconds on the clock that provides `now_s` for `StepScheduler.next_batch`. None if there is no
    deadline."""
    waited: int = 0
    """Number of steps of other requests since this request's last step."""
    arrival: int = field(default_factory=lambda: next(_arrivals))


class StepScheduler:
    """Selects the requests of the next step by priority, then by the fewest remaining steps, without starvation.

    Short requests run first because they delay long requests only a little. A request that has waited for
    `max_wait_steps` steps takes precedence over all others. The next in precedence is a request that would otherwise
    miss its deadline. Requests with similar numbers of tokens share a step if sharing lowers the time per request. The
    numbers must be similar because all rows of a forward pass are padded to the longest row.
    """

    def __init__(self, *, max_wait_steps: int, max_batch: int) -> None:
        self.step_s = 0.0
        """Moving average of the step duration, in seconds. 0 until the first step has completed."""
        self._max_wait_steps = max_wait_steps
        self._sizes = BatchSizes(max_batch)
        self._turns: set[Turn] = set()

    def add(self, turn: Turn) -> None:
        """Adds a request to the requests that wait for their next step."""
        turn.waited = 0
        self._turns.add(turn)

    def remove(self, turn: Turn) -> None:
        """Removes a request from the waiting requests. Does nothing if the request is not waiting."""
        self._turns.discard(turn)

    def next_batch(self, now_s: float) -> list[Turn]:
        """Returns the requests that run the next step together, or an empty list if no request is waiting.

        The returned requests remain in the scheduler. `now_s` is compared with the deadlines of requests.
        """
        ordered = sorted(self._turns, key=lambda turn: self._rank(turn, now_s))
        if not ordered:
            return []
        first = ordered[0]
        candidates = [turn for turn in ordered if _can_join(turn, first)]
        batch = candidates[: self._sizes.size(self._size_class(first), len(candidates))]
        for turn in ordered:
            turn.waited = 0 if turn in batch else turn.waited + 1
        return batch

    def done(self, batch: Sequence[Turn], seconds: float) -> None:
        """Records that the requests in `batch` have completed a step, which took `seconds` seconds."""
        self._sizes.record(self._size_class(batch[0]), len(batch), seconds)
        self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds
        for turn in batch:
            turn.steps_left -= 1

    def work_s(self) -> float:
        """Returns the estimated total duration of all remaining steps of the waiting requests, in seconds."""
        return self.step_s * sum(turn.steps_left for turn in self._turns)

    # -- inner workings

    def _rank(self, turn: Turn, now_s: float) -> tuple[object, ...]:
        late = turn.deadline_s is not None and now_s + (turn.steps_left + 1) * self.step_s >= turn.deadline_s
        overdue = turn.waited >= self._max_wait_steps
        return (not overdue, -turn.waited if overdue else 0, not late, -turn.priority, turn.steps_left, turn.arrival)

    @staticmethod
    def _size_class(turn: Turn) -> Hashable:
        """Returns the key of a request's size class. Steps of requests in the same size class take about the same
        time."""
        return (turn.key, turn.tokens.bit_length())


class BatchSizes:
    """Finds the batch size with the shortest time per request, based on measured step durations.

    Batch sizes are measured in ascending order. Each batch size is measured several times, because a single step may be
    slow by chance. The shortest of the recent durations is used.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._times: OrderedDict[Hashable, dict[int, deque[float]]] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of size classes that have measurements."""
        return len(self._times)

    def size(self, key: Hashable, available: int) -> int:
        """Returns the batch size for the next step, at most `available`. `key` is the size class of the requests."""
        times, best = self._times.get(key, {}), 1
        limit = min(available, self._max_batch)
        for size in range(1, limit + 1):
            if len(times.get(size, ())) < _MIN_MEASUREMENTS:
                return size
            if self._row_s(times, size) < _WORTHWHILE_RATIO * self._row_s(times, best):
                best = size
        return best

    def record(self, key: Hashable, size: int, seconds: float) -> None:
        """Records the duration in seconds of a step with `size` requests in the size class `key`."""
        self._times.setdefault(key, {}).setdefault(size, deque(maxlen=_KEPT_MEASUREMENTS)).append(seconds)
        self._times.move_to_end(key)
        if len(self._times) > _MAX_KEYS:
            self._times.popitem(last=False)

    @staticmethod
    def _row_s(times: dict[int, deque[float]], size: int) -> float:
        return min(times[size]) / size


def _can_join(turn: Turn, first: Turn) -> bool:
    is_similar = turn.key == first.key and max(turn.tokens, first.tokens) <= _MAX_TOKENS_RATIO * min(
        turn.tokens, first.tokens
    )
    return is_similar and turn.steps_left <= _MAX_STEPS_RATIO * first.steps_left


_MAX_TOKENS_RATIO = 2
"""Maximum ratio of the token counts of two requests that share a step."""
_MAX_STEPS_RATIO = 3
"""Maximum ratio of a request's remaining steps to the remaining steps of the first request in the batch."""
_WORTHWHILE_RATIO = 0.97
_MIN_MEASUREMENTS = 2
_KEPT_MEASUREMENTS = 16
_MAX_KEYS = 1024
