"""The sizes of chunks that depend on play-out time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.wire.chunk_sizes import FramesPolicy, PlayoutPace, PlayoutSizes
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.packets import Packet

SIZES = (1, 2, 4, 8, 16, 25)
FRAME_S = 0.08
# Measured on a GPU (a vocoder of 12.5 frames a second), and assumed for a CPU.
GPU_S = {4: 0.0116, 32: 0.0144}
CPU_S = {4: 0.15, 8: 0.25, 16: 0.45, 32: 0.7}
GPU_PACE = PlayoutPace(0.01, FRAME_S, GPU_S)


@dataclass
class Play:
    """Cuts frames that arrive at given intervals, and records the chunks with the times at which they were cut."""

    pace: PlayoutPace
    allowed: Sequence[int] = SIZES
    context: int = 0
    now_s: float = 0.0
    waiting: int = 0
    cut: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def __post_init__(self) -> None:
        self._sizes = PlayoutSizes(self.allowed, self.pace, context=self.context, clock=lambda: self.now_s)

    def run(self, intervals_s: Sequence[float]) -> "Play":
        """Makes one frame after each interval."""
        for interval_s in intervals_s:
            self.now_s += interval_s
            self.waiting += 1
            self._sizes.add(1)
            while size := self._sizes.next_size(self.waiting):
                self.cut.append((self.now_s, size))
                self.waiting -= size
        return self

    @property
    def sizes(self) -> list[int]:
        """The sizes of the chunks."""
        return [size for _, size in self.cut]

    def due_in_s(self) -> float | None:
        """Returns the time until the waiting frames are due, or None."""
        due_s = self._sizes.due_s(self.waiting)
        return None if due_s is None else due_s - self.now_s

    def pause(self) -> "Play":
        """Lets the producer pause until the waiting frames are cut, and returns this play."""
        due_s = self._sizes.due_s(self.waiting)
        assert due_s is not None, "frames are waiting"
        self.now_s = max(self.now_s, due_s)
        self._sizes.cut(self.waiting)
        self.cut.append((self.now_s, self.waiting))
        self.waiting = 0
        return self

    def longest_gap_s(self) -> float:
        """Returns the longest time in which nothing is played between two chunks, if calls take as long as expected."""
        worst_s = dry_s = ready_s = 0.0
        for number, (cut_s, size) in enumerate(self.cut):
            ready_s = max(cut_s, ready_s) + self.pace.cost_s(size + (self.context if number else 0))
            worst_s = max(worst_s, ready_s - dry_s) if number else 0.0
            dry_s = max(dry_s, ready_s) + size * FRAME_S
        return worst_s


@pytest.mark.parametrize("frames", range(40, 60))
def test_no_audio_waits_for_a_producer_that_pauses(frames: int) -> None:
    play = Play(GPU_PACE, (4, 16, 25)).run([0.01] * frames)
    if play.waiting:
        play.pause()
    assert sum(play.sizes) == frames
    assert play.longest_gap_s() == 0


def test_frames_of_a_slow_producer_wait_for_the_smallest_chunk() -> None:
    # Each frame arrives when the audio has run dry, but not later than usual.
    play = Play(GPU_PACE, (4, 25)).run([0.01] * 4 + [0.2] * 30)
    assert play.waiting == 2
    assert play.due_in_s() == pytest.approx(4 * 0.2, rel=0.01)


def test_nothing_is_due_before_the_first_chunk() -> None:
    assert Play(GPU_PACE, (4, 25)).run([0.01] * 3).due_in_s() is None


@pytest.mark.parametrize(
    ("pace", "sizes"),
    [
        (GPU_PACE, [1, 4, 25, 25, 25]),
        (PlayoutPace(0.03, FRAME_S, {4: 0.04, 32: 0.08}), [1, 2, 4, 8, 16, 25, 25]),
        (PlayoutPace(0.03, FRAME_S, {4: 0.04, 32: 0.08}, reserve_s=0.165), [4, 4, 8, 16, 25, 25]),
        (PlayoutPace(0.03, FRAME_S, CPU_S), [16, 25, 25]),
        (PlayoutPace(0.06, FRAME_S, GPU_S), [2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16]),
        # The producer is slower than the play-out, or the consumer is.
        (PlayoutPace(0.09, FRAME_S, GPU_S), [4, *[2] * 43]),
        (PlayoutPace(0.01, FRAME_S, {32: 3.0}), [25, 25, 25]),
    ],
    ids=["gpu", "loaded", "busy loaded", "cpu", "slow talker", "slower", "slow consumer"],
)
def test_sizes_grow_as_fast_as_the_costs_permit(pace: PlayoutPace, sizes: Sequence[int]) -> None:
    assert Play(pace).run([pace.frame_interval_s] * 90).sizes == sizes


def test_a_talker_that_becomes_slow_sends_what_it_has() -> None:
    steady, slowed = (Play(GPU_PACE).run([0.01] * 10 + [late_s] * 30) for late_s in (0.01, 0.07))
    assert steady.sizes == [1, 4, 25]
    assert max(slowed.sizes) < 16
    assert slowed.longest_gap_s() == 0


def test_a_small_size_is_not_repeated_if_its_calls_take_much_time() -> None:
    for cost_s, sizes in ((0.03, {4, 8, 16}), (0.06, {8, 16}), (0.12, {16})):
        pace = PlayoutPace(0.06, FRAME_S, {16: cost_s})
        assert set(Play(pace, allowed=(4, 8, 16)).run([0.06] * 90).sizes[1:]) == sizes


def test_repeated_frames_cost_time() -> None:
    costs_s = {1: 0.01, 2: 0.02, 4: 0.04, 8: 0.08, 16: 0.16, 32: 0.32, 64: 0.64}
    plain, repeating = (Play(PlayoutPace(0.01, FRAME_S, costs_s), context=context) for context in (0, 25))
    assert plain.run([0.01] * 60).sizes[0] == 1
    assert repeating.run([0.01] * 60).sizes[0] == 16


def test_a_small_call_costs_at_most_as_much_as_a_large_one() -> None:
    # The first call of a process takes long, and this size is not chosen again until that is forgotten.
    pace = PlayoutPace(0.01, FRAME_S, {1: 9.0, 32: 0.02})
    assert [pace.cost_s(1), pace.cost_s(30), pace.cost_s(64)] == [0.02, 0.02, 0.04]


@given(
    frame_interval_s=st.floats(0.001, 0.07),
    costs_s=st.lists(st.floats(0.001, 0.3), min_size=6, max_size=6),
    reserve_s=st.floats(0, 0.3),
    context=st.sampled_from([0, 25]),
)
def test_play_out_never_waits(frame_interval_s: float, costs_s: list[float], reserve_s: float, context: int) -> None:
    costs_by_frames_s = dict(zip((1, 2, 4, 8, 16, 64), sorted(costs_s), strict=True))
    pace = PlayoutPace(frame_interval_s, FRAME_S, costs_by_frames_s, reserve_s)
    play = Play(pace, context=context).run([frame_interval_s] * 120)
    # A chunk must be late only if even chunks of the largest size cannot be ready in time.
    if 25 * frame_interval_s + reserve_s + pace.cost_s(25 + context) < 25 * FRAME_S:
        assert play.longest_gap_s() <= 2 * frame_interval_s


@pytest.mark.parametrize("wrong", [(0.0, 0.08, {1: 0.1}, 0.0), (0.1, 0.08, {}, 0.0), (0.1, 0.08, {1: 0.1}, -1.0)])
def test_a_pace_has_positive_numbers(wrong: tuple[float, float, dict[int, float], float]) -> None:
    with pytest.raises(ValueError, match="a pace needs positive numbers"):
        PlayoutPace(*wrong)


def _at(rows: Array, start: int, end: int) -> Packet:
    return Packet({"x": rows[start:end]}, {"token_start": int(start)})


@given(lengths=st.lists(st.integers(0, 40), max_size=12), context=st.sampled_from([0, 3]))
def test_chunks_contain_each_row_once_and_have_permitted_sizes(lengths: list[int], context: int) -> None:
    chunker = Chunker(FramesPolicy(25, (1, 2, 4, 8, 16), context, GPU_PACE))
    rows = np.arange(sum(lengths))
    ends = np.cumsum([0, *lengths])
    chunks = [chunk for start, end in pairwise(ends) for chunk in chunker.push(_at(rows, start, end))]
    last = chunker.finish()
    assert all(chunk.metadata["token_start"] == chunk.tensors["x"][0] for chunk in (*chunks, *last))
    own = [chunk.tensors["x"][int(str(chunk.metadata.get("context_frames", 0))) :] for chunk in [*chunks, *last]]
    assert np.array_equal(np.concatenate([rows[:0], *own]), rows)
    assert {len(each) for each in own[: len(chunks)]} <= set(SIZES)
