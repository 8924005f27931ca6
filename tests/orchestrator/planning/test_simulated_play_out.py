"""Many listeners of one vocoder in virtual time: chosen ramps, measured costs and the order of calls together."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import pytest

from stagemesh.orchestrator.planning.chunk_ramps import Pace, choose_sizes
from stagemesh.services.engines.function.playout import AudioStream, CallCosts, CallQueue

FRAME_S = 0.08
SIZES = (1, 2, 4, 8, 16, 25)
MAX_BATCH = 32


def gpu_cost_s(frames: int, rows: int) -> float:
    """A published vocoder: 3 frames take 11.6 ms, 24 frames take 14.4 ms, and a row in eights takes a third."""
    return (0.0112 + 0.00013 * frames) * (1 + 0.2 * (rows - 1))


def cpu_cost_s(frames: int, rows: int) -> float:
    """A slow vocoder: 25 frames, which play for 2 s, take 0.32 s. Rows save little."""
    return (0.02 + 0.012 * frames) * (1 + 0.8 * (rows - 1))


@dataclass
class Listener:
    """A request, and the play-out of its audio."""

    began_s: float
    sizes: Sequence[int]
    frame_interval_s: float
    left: int
    stream: AudioStream = field(default_factory=AudioStream)
    chunks: int = 0
    made: int = 0
    first_s: float = 0.0
    worst_gap_s: float = 0.0

    @property
    def next_size(self) -> int:
        """The number of frames of the next chunk."""
        return min(self.left, self.sizes[min(self.chunks, len(self.sizes) - 1)])

    @property
    def next_ready_s(self) -> float:
        """The time at which the producer has made the next chunk."""
        return self.began_s + (self.made + self.next_size) * self.frame_interval_s

    def receive(self, *, now_s: float) -> None:
        """Adds the audio of the next chunk."""
        size = self.next_size
        if self.chunks:
            self.worst_gap_s = max(self.worst_gap_s, now_s - self.stream.dry_s)
        else:
            self.first_s = now_s - self.began_s
        self.stream.add(size * FRAME_S, now_s=now_s)
        self.made, self.left, self.chunks = self.made + size, self.left - size, self.chunks + 1


class Vocoder:
    """A function stage, its waiting calls and what it measures. `in_order` replaces play-out time by arrival."""

    def __init__(self, cost_s: Callable[[int, int], float], *, in_order: bool) -> None:
        self.costs, self._cost_s, self._in_order = CallCosts(), cost_s, in_order
        self._queue = CallQueue[Listener]()
        self.batch: list[Listener] = []

    def add(self, listener: Listener, *, now_s: float) -> None:
        """Adds a call for the next chunk of a listener."""
        shape = (listener.stream.has_begun, listener.next_size)
        due_s = now_s if self._in_order else self.costs.due_s(listener.stream, now_s=now_s)
        self._queue.add(listener, shape=shape, due_s=due_s)

    def start(self) -> float | None:
        """Starts the next batch if the vocoder is idle. Returns its duration in seconds, or None."""
        if self.batch or not self._queue:
            return None
        self.batch = self._queue.pop_batch(MAX_BATCH)
        frames = [each.next_size for each in self.batch]
        took_s = self._cost_s(frames[0], len(frames))
        self.costs.add(frames, took_s=took_s, audio_s=sum(frames) * FRAME_S)
        return took_s


def simulate(
    vocoder: Vocoder, *, per_s: float, frame_interval_s: float, ramp: Sequence[int] | None = None, requests: int = 1000
) -> list[Listener]:
    """Runs requests that arrive at random. `ramp` is a fixed ramp, or None for `ramp: auto`. Returns the listeners."""
    rng, numbers, now_s = random.Random(1), count(), 0.0
    events: list[tuple[float, int, Listener | None]] = []
    for _ in range(requests):
        now_s += rng.expovariate(per_s)
        heappush(events, (now_s, next(numbers), Listener(now_s, (), frame_interval_s, rng.randint(20, 120))))
    listeners, running = list[Listener](), 0
    while events:
        now_s, _, listener = heappop(events)
        if listener is None:
            done, vocoder.batch = vocoder.batch, []
            for each in done:
                each.receive(now_s=now_s)
                running -= not each.left
                if each.left:
                    heappush(events, (max(now_s, each.next_ready_s), next(numbers), each))
        elif listener.sizes:
            vocoder.add(listener, now_s=now_s)
        else:
            pace = Pace(frame_interval_s, FRAME_S, vocoder.costs.by_frames, is_shared=running > 0)
            listener.sizes = ramp or (choose_sizes(SIZES, pace) if pace.call_costs_s else SIZES)
            running += 1
            listeners.append(listener)
            heappush(events, (listener.next_ready_s, next(numbers), listener))
        if (took_s := vocoder.start()) is not None:
            heappush(events, (now_s + took_s, next(numbers), None))
    return listeners


def c50(listeners: Sequence[Listener]) -> float:
    """Returns the share of listeners who wait at most 50 ms for a chunk."""
    return sum(each.worst_gap_s <= 0.05 for each in listeners) / len(listeners)


def first_ms(listeners: Sequence[Listener]) -> list[int]:
    """Returns the median and the 95th percentile of the time to the first audio, in milliseconds."""
    times = sorted(each.first_s for each in listeners)
    return [round(1000 * times[int(share * len(times))]) for share in (0.5, 0.95)]


@pytest.mark.parametrize(
    ("cost_s", "per_s", "frame_interval_s", "no_gap", "first_p95_ms"),
    [
        (gpu_cost_s, 4, 0.012, 0.999, 50),
        (gpu_cost_s, 30, 0.012, 0.99, 120),
        (gpu_cost_s, 20, 0.03, 0.99, 150),
        # A request that begins alone expects no others, whose calls take long.
        (cpu_cost_s, 0.2, 0.03, 0.97, 1500),
    ],
    ids=["idle gpu", "busy gpu", "slow talker", "cpu"],
)
def test_listeners_hear_no_gaps(
    cost_s: Callable[[int, int], float], per_s: float, frame_interval_s: float, no_gap: float, first_p95_ms: int
) -> None:
    listeners = simulate(Vocoder(cost_s, in_order=False), per_s=per_s, frame_interval_s=frame_interval_s)
    assert c50(listeners) >= no_gap
    assert first_ms(listeners)[1] <= first_p95_ms


@pytest.mark.parametrize(("ramp", "with_gaps"), [((1, 4, 25), 0.1), ((1, 2, 4, 8, 25), 0.5)])
def test_a_fixed_ramp_in_arrival_order_has_gaps(ramp: Sequence[int], with_gaps: float) -> None:
    listeners = simulate(Vocoder(gpu_cost_s, in_order=True), per_s=30, frame_interval_s=0.012, ramp=ramp)
    assert c50(listeners) < 1 - with_gaps
