"""Measures the lateness of an event loop's timers, and the part of it that the machine causes."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.edge_ways.worker import End

_TICK_S = 0.002
_NOTED_S = 0.003
"""Timers that are less late are not reported."""
_SCHEDULING = Path("/proc/thread-self/schedstat")


class Tick(NamedTuple):
    """A timer that was late, in seconds of the machine's monotonic clock."""

    due_s: float
    late_s: float
    queued_s: float
    """The time for which other processes had the processors meanwhile."""
    worked_s: float
    """The processor time of the loop's thread meanwhile."""


@dataclass(frozen=True)
class Stalls:
    """The largest lateness of the loop's timers, in milliseconds."""

    late_ms: float
    bare_ms: float
    """The largest lateness of the idle loops."""
    stalled_ms: float
    """The largest lateness without the time in which other processes had the processors or an idle loop was late."""
    worked_ms: float
    """The most processor time of the loop's thread between two timers."""


class LoopProbe:
    """Probes the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._queued_s = self._worked_s = 0.0
        self._ticks: list[Tick] = []

    def begin(self) -> None:
        """From now on."""
        self._ticks = []
        self._wait()

    def end(self) -> list[Tick]:
        """The late ticks since."""
        if self._timer is not None:
            self._timer.cancel()
        return self._ticks

    def _wait(self) -> None:
        self._due_s = time.monotonic() + _TICK_S
        self._queued_s, self._worked_s = _queued_s(), time.thread_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s > _NOTED_S:
            queued_s, worked_s = _queued_s() - self._queued_s, time.thread_time() - self._worked_s
            self._ticks.append(Tick(self._due_s, late_s, queued_s, worked_s))
        self._wait()


class BareLoop(End):
    """An idle loop on one processor: only the machine delays its timers."""

    async def open(self) -> None:
        """Does nothing: `begin` starts the probe."""
        self._probe = LoopProbe()

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""

    async def begin(self, processor: int) -> None:
        """Starts the probe."""
        os.sched_setaffinity(0, {processor})
        self._probe.begin()

    async def end(self) -> list[Tick]:
        """The late ticks since."""
        return self._probe.end()


def stalls(ticks: Sequence[Tick], bare: Sequence[Tick]) -> Stalls:
    """Returns the stalls of a loop, given the ticks of idle loops at the same time."""
    stopped = [(tick.due_s, tick.due_s + tick.late_s - tick.queued_s) for tick in sorted(bare)]
    return Stalls(
        late_ms=1e3 * max((tick.late_s for tick in ticks), default=0),
        bare_ms=1e3 * max((tick.late_s for tick in bare), default=0),
        stalled_ms=1e3 * max((tick.late_s - tick.queued_s - _overlap_s(tick, stopped) for tick in ticks), default=0),
        worked_ms=1e3 * max((tick.worked_s for tick in ticks), default=0),
    )


def _overlap_s(tick: Tick, stopped: Sequence[tuple[float, float]]) -> float:
    """Returns for how much of a tick's lateness an idle loop was late too. `stopped` is in order of time."""
    overlap_s, reached_s = 0.0, tick.due_s
    for stop_s, go_on_s in stopped:
        begin_s, end_s = max(stop_s, reached_s), min(go_on_s, tick.due_s + tick.late_s)
        if begin_s < end_s:
            overlap_s, reached_s = overlap_s + end_s - begin_s, end_s
    return overlap_s


def _queued_s() -> float:
    """Returns the time for which this thread has waited for a processor."""
    return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
