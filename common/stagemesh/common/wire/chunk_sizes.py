"""Chunk policies: how the packets of a flow are cut into chunks, and the sizes that keep its audio from running dry."""

import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

_MAX_SHARE = 1 / 8
"""The maximum duration of a call, as a share of its audio's duration, at which a size below the largest is used after
the first chunk. Smaller calls would occupy the consumer for more time than they gain.
"""
_PAUSE_S, _PAUSE_ROWS = 0.05, 4
"""A producer pauses if no row arrives for this number of seconds, and for this number of usual times between rows."""
_EWMA_WEIGHT = 0.2
"""The weight of the newest row in the moving average of the time between rows."""


@dataclass(frozen=True)
class PlayoutPace:
    """The measured speed of the producer and of the consumer of a flow whose rows are frames of audio."""

    frame_interval_s: float
    """The expected time in which the producer makes one frame, in seconds."""
    frame_audio_s: float
    """The duration of the audio that the consumer makes from one frame, in seconds."""
    call_costs_s: Mapping[int, float]
    """The duration of the consumer's calls in seconds, by the maximum number of frames of a call. Not empty."""
    reserve_s: float = 0.0
    """The time by which a chunk must be ready before the audio runs dry, in seconds.

    It covers the time for which a complete chunk may have to wait before the consumer's call begins, and the audio that
    the consumer retains until the next chunk.
    """

    def __post_init__(self) -> None:
        numbers = (self.frame_interval_s, self.frame_audio_s, *self.call_costs_s, *self.call_costs_s.values())
        if not self.call_costs_s or not all(0 < number < inf for number in numbers) or not 0 <= self.reserve_s < inf:
            raise ValueError(f"a pace needs positive numbers and at least one call, not {self}")

    def cost_s(self, frames: int) -> float:
        """Returns the estimated duration of a call with this number of frames, in seconds.

        A call takes no longer than one with more frames, even if an older measurement says so. A call with more frames
        than any measured one takes longer in proportion.
        """
        largest = max(self.call_costs_s)
        costs_s = [cost_s for most, cost_s in self.call_costs_s.items() if most >= frames]
        return min(costs_s) if costs_s else self.call_costs_s[largest] * frames / largest


class ChunkSizes(ABC):
    """Chooses the size of each chunk of one flow. By default, the sizes do not depend on time."""

    def add(self, rows: int) -> None:  # noqa: B027
        """Records that `rows` more rows have arrived. Called before `next_size`."""

    @abstractmethod
    def next_size(self, waiting: int) -> int:
        """Returns the number of rows of the chunk that is cut now, or 0 if no chunk is cut yet.

        `waiting` is the number of rows that are in no chunk yet. If the result is not 0, the caller cuts the chunk.
        """

    def due_s(self, waiting: int) -> float | None:  # noqa: ARG002
        """Returns the time at which `waiting` rows must be cut although they are too few, or None if they can wait.

        The time is a time on the monotonic clock. It holds until the next call of `add`.
        """
        return None

    def cut(self, waiting: int) -> None:  # noqa: B027
        """Records that the waiting rows are cut now although they are too few."""


class FixedSizes(ChunkSizes):
    """`ChunkSizes` that are known in advance: those of a ramp, then always the same one."""

    def __init__(self, ramp: Sequence[int], frames: int) -> None:
        self._ramp, self._frames = iter(ramp), frames
        self._wanted = next(self._ramp, frames)

    def next_size(self, waiting: int) -> int:
        """Returns the next size if as many rows are waiting."""
        if waiting < self._wanted:
            return 0
        size, self._wanted = self._wanted, next(self._ramp, self._frames)
        return size


class PlayoutSizes(ChunkSizes):
    """`ChunkSizes` that depend on how much of the flow's audio has not been played.

    The first chunk is as small as permitted, so that audio begins early, but plays until a second chunk can be ready.
    Each later chunk is the largest one that is ready before the audio runs dry at the present speed of the producer,
    because a call with many frames takes little longer than one with few. If the producer pauses, for example between
    two sentences, the rows that wait are cut before the audio runs dry.
    """

    def __init__(
        self, sizes: Sequence[int], pace: PlayoutPace, *, context: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sizes` are the permitted sizes, ascending. `context` is the number of rows that later chunks repeat."""
        self._sizes, self._pace, self._clock = sizes, pace, clock
        self._costs_s = {size: pace.cost_s(size + context) for size in sizes}
        """The duration of the consumer's call for a later chunk, by its size."""
        self._interval_s = pace.frame_interval_s
        self._arrived_s: float | None = None
        self._last_size = 0
        """The size of the last chunk. 0 before the first chunk."""
        self._ready_s, self._dry_s = 0.0, 0.0
        """The times at which the consumer has processed all chunks so far, and at which their audio has been played."""

    def add(self, rows: int) -> None:
        """Measures the time between rows."""
        now_s = self._clock()
        if self._arrived_s is not None and rows:
            self._interval_s += _EWMA_WEIGHT * ((now_s - self._arrived_s) / rows - self._interval_s)
        self._arrived_s = now_s

    def next_size(self, waiting: int) -> int:
        """Returns the largest size that is waiting, unless a larger chunk would be ready in time."""
        now_s = self._clock()
        if not self._last_size:
            size = next((size for size in self._sizes if self._lasts(size)), self._sizes[-1])
            return self._cut(size, self._pace.cost_s(size), now_s) if waiting >= size else 0
        sizes = self._sizes_after(self._last_size)
        at = bisect_right(sizes, waiting)
        if at and at < len(sizes):
            complete_s = now_s + (sizes[at] - waiting) * self._interval_s
            if max(complete_s, self._ready_s) + self._pace.reserve_s + self._costs_s[sizes[at]] <= self._dry_s:
                return 0
        return self._cut(sizes[at - 1], self._costs_s[sizes[at - 1]], now_s) if at else 0

    def due_s(self, waiting: int) -> float | None:
        """Returns the latest time at which the waiting rows can be cut before the audio runs dry, but not before the
        producer pauses. None before the first chunk, because nothing is played then.
        """
        if not waiting or not self._last_size or self._arrived_s is None:
            return None
        ready_in_s = self._pace.reserve_s + self._costs_s[next(size for size in self._sizes if size >= waiting)]
        return max(self._arrived_s + max(_PAUSE_S, _PAUSE_ROWS * self._interval_s), self._dry_s - ready_in_s)

    def cut(self, waiting: int) -> None:
        """Records that the waiting rows are cut now although they are too few."""
        size = next(size for size in self._sizes if size >= waiting)
        self._cut(waiting, self._costs_s[size], self._clock())

    # -- internals

    def _sizes_after(self, last: int) -> list[int]:
        """Returns the sizes that may follow a chunk of the size `last`.

        A larger size may. A smaller or equal one may if its call takes a small share of its audio's duration.
        """
        most_s = _MAX_SHARE * self._pace.frame_audio_s
        largest = self._sizes[-1]
        return [each for each in self._sizes if each > last or each == largest or self._costs_s[each] <= each * most_s]

    def _lasts(self, first: int) -> bool:
        """Returns whether no chunk after a first one of this size is late, if each is the smallest that may follow.

        Times are relative to the end of the first chunk's last frame, at the present speed of the producer.
        """
        size, ready_s, complete_s = first, self._pace.cost_s(first), 0.0
        dry_s = ready_s + first * self._pace.frame_audio_s
        while True:
            following = self._sizes_after(size)[0]
            complete_s += following * self._interval_s
            ready_s = max(complete_s, ready_s) + self._costs_s[following]
            if ready_s + self._pace.reserve_s > dry_s:
                return False
            if following in {size, self._sizes[-1]}:
                return True
            size, dry_s = following, dry_s + following * self._pace.frame_audio_s

    def _cut(self, size: int, cost_s: float, now_s: float) -> int:
        """Records that a chunk is cut now. Returns its size."""
        self._last_size = size
        self._ready_s = max(now_s, self._ready_s) + cost_s
        self._dry_s = max(self._dry_s, self._ready_s) + size * self._pace.frame_audio_s
        return size


@dataclass(frozen=True)
class StepPolicy:
    """The chunk policy that sends each packet of the engine as one chunk."""


@dataclass(frozen=True)
class WholePolicy:
    """The chunk policy that sends one chunk, when the flow ends. The chunk joins all packets along their first axis."""


@dataclass(frozen=True)
class FramesPolicy:
    """The chunk policy that joins packets along their first axis and cuts them into chunks of `frames` rows."""

    frames: int
    ramp: tuple[int, ...] = ()
    """The numbers of rows of the first chunks. Each later chunk has `frames` rows."""
    left_context_frames: int = 0
    """The maximum number of preceding rows that each chunk repeats at its front. The first chunk repeats no rows."""
    pace: PlayoutPace | None = None
    """The speed of the stages, if it is known. Each chunk then has the size of `ramp` or `frames` that suits it."""

    def __post_init__(self) -> None:
        if min((self.frames, *self.ramp)) < 1 or self.left_context_frames < 0:
            raise ValueError(f"chunk policy needs frames >= 1, also in ramp, and left_context_frames >= 0, not {self}")

    @property
    def sizes(self) -> ChunkSizes:
        """The sizes of the chunks of a new flow."""
        if self.pace is None:
            return FixedSizes(self.ramp, self.frames)
        return PlayoutSizes(sorted({*self.ramp, self.frames}), self.pace, context=self.left_context_frames)


ChunkPolicy: TypeAlias = StepPolicy | WholePolicy | FramesPolicy
