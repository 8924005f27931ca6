"""Many listeners of one vocoder in virtual time: chosen ramps, measured costs and the order of calls together."""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from stagemesh.common.wire.chunk_sizes import ChunkSizes, FixedSizes, PlayoutPace, PlayoutSizes
from stagemesh.services.engines.function.playout import AudioStream, CallCosts, CallQueue
from tests.orchestrator.admission.driver import Agenda
from tests.orchestrator.replicas import Clock

FRAME_S = 0.08
SIZES = (1, 2, 4, 8, 16, 25)
MAX_BATCH = 32


def gpu_cost_s(frames: int, rows: int) -> float:
    """A published vocoder: 3 frames take 11.6 ms, 24 frames take 14.4 ms, and a row in eights takes a third."""
    return (0.0112 + 0.00013 * frames) * (1 + 0.2 * (rows - 1))


def cpu_cost_s(frames: int, rows: int) -> float:
    """A slow vocoder: 25 frames, which play for 2 s, take 0.32 s. Rows save little."""
    return (0.02 + 0.012 * frames) * (1 + 0.8 * (rows - 1))


def tiny_cost_s(frames: int, rows: int) -> float:
    """A tiny vocoder, for which no chunk waits long."""
    return 0.001 + 0.0001 * frames * rows


@dataclass
class Listener:
    """A request, and the play-out of its audio."""

    began_s: float
    sizes: ChunkSizes
    left: int
    """The number of frames that the producer has not made yet."""
    retained_s: float
    """The duration of the audio that the vocoder retains until its next call."""
    stream: AudioStream = field(default_factory=AudioStream)
    waiting: int = 0
    """The number of frames that are in no chunk yet."""
    chunks: deque[int] = field(default_factory=deque[int])
    """The sizes of the chunks that have not been decoded, in order."""
    first_s: float = 0.0
    worst_gap_s: float = 0.0

    @property
    def next_audio_s(self) -> float:
        """The duration of the audio that the vocoder makes of the next chunk."""
        is_last = not self.left and len(self.chunks) == 1
        return self.chunks[0] * FRAME_S + self.retained_s * (is_last - (not self.stream.has_begun))

    def make_frame(self) -> None:
        """Adds a frame of the producer, and the chunks that are complete now."""
        self.left, self.waiting = self.left - 1, self.waiting + 1
        self.sizes.add(1)
        while size := self.sizes.next_size(self.waiting):
            self.chunks.append(size)
            self.waiting -= size
        if self.waiting and not self.left:
            self.chunks.append(self.waiting)
            self.waiting = 0

    def receive(self, *, now_s: float) -> None:
        """Adds the audio of the next chunk."""
        if self.stream.has_begun:
            self.worst_gap_s = max(self.worst_gap_s, now_s - self.stream.dry_s)
        else:
            self.first_s = now_s - self.began_s
        self.stream.add(self.next_audio_s, now_s=now_s)
        self.chunks.popleft()


class Vocoder:
    """A function stage, its waiting calls and what it measures. `in_order` replaces play-out time by arrival.

    `retained_s` is the duration of the audio that it retains of a request's frames until the next call.
    """

    def __init__(self, cost_s: Callable[[int, int], float], *, in_order: bool = False, retained_s: float = 0.0) -> None:
        self.costs, self.retained_s = CallCosts(), retained_s
        self._cost_s, self._in_order = cost_s, in_order
        self._queue = CallQueue[Listener]()
        self.batch: list[Listener] = []

    def add(self, listener: Listener, *, now_s: float) -> None:
        """Adds a call for the next chunk of a listener."""
        shape = (listener.stream.has_begun, listener.chunks[0])
        due_s = now_s if self._in_order else self.costs.due_s(listener.stream, now_s=now_s)
        self._queue.add(listener, shape=shape, due_s=due_s)

    def start(self) -> float | None:
        """Starts the next batch if the vocoder is idle. Returns its duration in seconds, or None."""
        if self.batch or not self._queue:
            return None
        self.batch = self._queue.pop_batch(MAX_BATCH)
        frames = [each.chunks[0] for each in self.batch]
        took_s = self._cost_s(frames[0], len(frames))
        self.costs.add(frames, took_s=took_s, audio_s=sum(each.next_audio_s for each in self.batch))
        for each in self.batch:
            if not each.stream.has_begun:
                self.costs.add_first(each.chunks[0], audio_s=each.next_audio_s)
        return took_s


class Simulation:
    """Requests that arrive at random, their producer, and one vocoder, in virtual time."""

    def __init__(self, vocoder: Vocoder, *, interval_s: Callable[[int], float], ramp: Sequence[int] | None) -> None:
        """`interval_s` returns the time between frames for a number of requests at once.

        `ramp` is a fixed ramp, or None for `ramp: auto`.
        """
        self._vocoder, self._interval_s, self._ramp = vocoder, interval_s, ramp
        self._clock, self._running = Clock(), 0
        self._agenda = Agenda(self._clock)
        self.listeners: list[Listener] = []

    def run(self, *, per_s: float, requests: int) -> None:
        """Runs `requests` requests, `per_s` a second on average."""
        rng, arrival_s = random.Random(1), 0.0
        for _ in range(requests):
            arrival_s += rng.expovariate(per_s)
            self._agenda.add(arrival_s, partial(self._begin, rng.randint(20, 120)))
        self._agenda.run(until_s=math.inf)

    # -- internals

    def _begin(self, frames: int) -> None:
        interval_s, costs = self._interval_s(self._running + 1), self._vocoder.costs
        sizes: ChunkSizes = FixedSizes((self._ramp or SIZES)[:-1], SIZES[-1])
        if self._ramp is None and costs.by_frames:
            pace = PlayoutPace(interval_s, FRAME_S, costs.by_frames)
            shared_s = 2 * pace.cost_s(SIZES[-1]) if self._running else 0.0
            pace = replace(pace, reserve_s=0.005 + costs.audio_delay_s + shared_s)
            sizes = PlayoutSizes(SIZES, pace, clock=self._clock)
        listener = Listener(self._clock.now_s, sizes, frames, self._vocoder.retained_s)
        self._running += 1
        self.listeners.append(listener)
        self._agenda.add(interval_s, partial(self._make_frame, listener))

    def _make_frame(self, listener: Listener) -> None:
        idle = not listener.chunks
        listener.make_frame()
        if idle and listener.chunks:
            self._vocoder.add(listener, now_s=self._clock.now_s)
        if listener.left:
            self._agenda.add(self._interval_s(self._running), partial(self._make_frame, listener))
        else:
            self._running -= 1
        self._start_batch()

    def _start_batch(self) -> None:
        if (took_s := self._vocoder.start()) is not None:
            self._agenda.add(took_s, self._finish_batch)

    def _finish_batch(self) -> None:
        done, self._vocoder.batch = self._vocoder.batch, []
        for listener in done:
            listener.receive(now_s=self._clock.now_s)
            if listener.chunks:
                self._vocoder.add(listener, now_s=self._clock.now_s)
        self._start_batch()


def simulate(
    vocoder: Vocoder, *, per_s: float, interval_s: float, slower: float = 0.0, ramp: Sequence[int] | None = None
) -> list[Listener]:
    """Runs 1,000 requests that arrive at random.

    Each further request at once adds `slower` times `interval_s` to a frame.
    """
    simulation = Simulation(vocoder, interval_s=lambda running: interval_s * (1 + slower * (running - 1)), ramp=ramp)
    simulation.run(per_s=per_s, requests=1000)
    return simulation.listeners


def c50(listeners: Sequence[Listener]) -> float:
    """Returns the share of listeners who wait at most 50 ms for a chunk."""
    return sum(each.worst_gap_s <= 0.05 for each in listeners) / len(listeners)


def first_p95_ms(listeners: Sequence[Listener]) -> int:
    """Returns the 95th percentile of the time to the first audio, in milliseconds."""
    return round(1000 * sorted(each.first_s for each in listeners)[int(0.95 * len(listeners))])


_LOADS = {
    "idle gpu": (gpu_cost_s, 4, (0.012, 0), 0.999, 40),
    "busy gpu": (gpu_cost_s, 30, (0.012, 0), 0.99, 100),
    "slow talker": (gpu_cost_s, 20, (0.03, 0), 0.99, 120),
    # A request that begins alone expects no others, whose calls take long.
    "cpu": (cpu_cost_s, 0.2, (0.03, 0), 0.97, 1300),
    # Requests that arrive later slow the talker down.
    "changing talker": (gpu_cost_s, 14, (0.012, 0.05), 0.99, 110),
}


@pytest.mark.parametrize(("cost_s", "per_s", "talker", "no_gap", "within_ms"), _LOADS.values(), ids=_LOADS)
def test_listeners_hear_no_gaps(
    cost_s: Callable[[int, int], float], per_s: float, talker: tuple[float, float], no_gap: float, within_ms: int
) -> None:
    interval_s, slower = talker
    listeners = simulate(Vocoder(cost_s), per_s=per_s, interval_s=interval_s, slower=slower)
    assert c50(listeners) >= no_gap
    assert first_p95_ms(listeners) <= within_ms


@pytest.mark.parametrize("interval_s", [0.014, 0.016, 0.03])
def test_the_audio_that_the_vocoder_retains_leaves_no_gap(interval_s: float) -> None:
    # Without this measurement, nearly all listeners wait 10 ms for their second chunk.
    vocoder = Vocoder(tiny_cost_s, retained_s=0.025)
    listeners = simulate(vocoder, per_s=4, interval_s=interval_s)
    assert vocoder.costs.audio_delay_s == pytest.approx(0.025, rel=0.05)
    assert sum(each.worst_gap_s > 0 for each in listeners) / len(listeners) <= 0.005


@pytest.mark.parametrize(("ramp", "with_gaps"), [((1, 4, 25), 0.05), ((1, 2, 4, 8, 25), 0.3)])
def test_a_fixed_ramp_in_arrival_order_has_gaps(ramp: Sequence[int], with_gaps: float) -> None:
    listeners = simulate(Vocoder(gpu_cost_s, in_order=True), per_s=30, interval_s=0.012, ramp=ramp)
    assert c50(listeners) < 1 - with_gaps
