"""Measures how late an event loop runs its timers, and how much of the delay the machine causes."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.edge_ways.worker import End

_TICK_S = 0.002
_MIN_REPORTED_S = 0.003
"""Shorter delays are not reported."""
_SCHEDULING = Path("/proc/thread-self/schedstat")


class Tick(NamedTuple):
    """A timer that was late, in seconds of the machine's monotonic clock."""

    due_s: float
    late_s: float
    queued_s: float
    """How long the thread waited for a processor during the tick."""
    worked_s: float
    """How long the loop's thread computed during the tick."""


@dataclass(frozen=True)
class Stalls:
    """The longest delays of the loop's timers, in milliseconds."""

    late_ms: float
    idle_ms: float
    """The longest delay of the idle loops."""
    stalled_ms: float
    """The longest delay without the time in which other processes ran and in which an idle loop was delayed too."""
    worked_ms: float
    """The longest computation of the loop's thread between two timers."""


class LoopProbe:
    """Probes the running event loop with short timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._queued_s = self._worked_s = 0.0
        self._ticks: list[Tick] = []

    def begin(self) -> None:
        """Starts to probe."""
        self._ticks = []
        self._wait()

    def end(self) -> list[Tick]:
        """Stops the probe and returns the late ticks."""
        if self._timer is not None:
            self._timer.cancel()
        return self._ticks

    def _wait(self) -> None:
        self._due_s = time.monotonic() + _TICK_S
        self._queued_s, self._worked_s = _queued_s(), time.thread_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s > _MIN_REPORTED_S:
            queued_s, worked_s = _queued_s() - self._queued_s, time.thread_time() - self._worked_s
            self._ticks.append(Tick(self._due_s, late_s, queued_s, worked_s))
        self._wait()


class IdleLoop(End):
    """An idle event loop on one processor: only the machine delays its timers."""

    async def open(self) -> None:
        """Creates the probe. `begin` starts it."""
        self._probe = LoopProbe()

    async def close(self) -> None:
        """Does nothing."""

    async def begin(self, processor: int) -> None:
        """Pins this process to a processor and starts to probe."""
        os.sched_setaffinity(0, {processor})
        self._probe.begin()

    async def end(self) -> list[Tick]:
        """Stops the probe and returns the late ticks."""
        return self._probe.end()


def stalls(ticks: Sequence[Tick], idle: Sequence[Tick]) -> Stalls:
    """Returns the stalls of a loop, given its late ticks and those of the idle loops."""
    stopped = [(tick.due_s, tick.due_s + tick.late_s - tick.queued_s) for tick in sorted(idle)]
    return Stalls(
        late_ms=1e3 * max((tick.late_s for tick in ticks), default=0),
        idle_ms=1e3 * max((tick.late_s for tick in idle), default=0),
        stalled_ms=1e3 * max((tick.late_s - tick.queued_s - _overlap_s(tick, stopped) for tick in ticks), default=0),
        worked_ms=1e3 * max((tick.worked_s for tick in ticks), default=0),
    )


def _overlap_s(tick: Tick, stopped: Sequence[tuple[float, float]]) -> float:
    """Returns how long an idle loop was stopped during a tick's delay. `stopped` is sorted."""
    overlap_s, reached_s = 0.0, tick.due_s
    for stop_s, resume_s in stopped:
        begin_s, end_s = max(stop_s, reached_s), min(resume_s, tick.due_s + tick.late_s)
        if begin_s < end_s:
            overlap_s, reached_s = overlap_s + end_s - begin_s, end_s
    return overlap_s


def _queued_s() -> float:
    """Returns how long this thread has waited for a processor."""
    return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
