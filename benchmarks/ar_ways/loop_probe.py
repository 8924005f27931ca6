"""How late an event loop comes to its timers, and for how much of that the machine is the cause."""

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
"""What is less late than this is not told."""
_SCHEDULING = Path("/proc/thread-self/schedstat")


class Tick(NamedTuple):
    """One timer, in seconds of the machine's monotonic clock."""

    due_s: float
    late_s: float
    queued_s: float
    """For how long others had the processors meanwhile."""
    worked_s: float
    """What the loop's thread computed meanwhile."""


@dataclass(frozen=True)
class Stalls:
    """How late the loop came to its timers at most, in milliseconds."""

    late_ms: float
    bare_ms: float
    """The bare loops."""
    stalled_ms: float
    """Without the time for which others had the processors, and that in which a bare loop was stopped too."""
    worked_ms: float
    """What the loop's thread computed between two timers."""


class LoopProbe:
    """Lives on the running loop."""

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
    """A loop that has nothing to do, on one processor: what keeps it from its timers is the machine."""

    async def open(self) -> None:
        """Nothing yet; see `begin`."""
        self._probe = LoopProbe()

    async def close(self) -> None:
        """Nothing is held."""

    async def begin(self, processor: int) -> None:
        """Looks from now on."""
        os.sched_setaffinity(0, {processor})
        self._probe.begin()

    async def end(self) -> list[Tick]:
        """The late ticks since."""
        return self._probe.end()


def stalls(ticks: Sequence[Tick], bare: Sequence[Tick]) -> Stalls:
    """Of a loop, with what the bare loops beside it saw at the same time."""
    stopped = [(tick.due_s, tick.due_s + tick.late_s - tick.queued_s) for tick in sorted(bare)]
    return Stalls(
        late_ms=1e3 * max((tick.late_s for tick in ticks), default=0),
        bare_ms=1e3 * max((tick.late_s for tick in bare), default=0),
        stalled_ms=1e3 * max((tick.late_s - tick.queued_s - _overlap_s(tick, stopped) for tick in ticks), default=0),
        worked_ms=1e3 * max((tick.worked_s for tick in ticks), default=0),
    )


def _overlap_s(tick: Tick, stopped: Sequence[tuple[float, float]]) -> float:
    """For how long of a tick's lateness some bare loop was stopped; `stopped` is in order."""
    overlap_s, reached_s = 0.0, tick.due_s
    for stop_s, go_on_s in stopped:
        begin_s, end_s = max(stop_s, reached_s), min(go_on_s, tick.due_s + tick.late_s)
        if begin_s < end_s:
            overlap_s, reached_s = overlap_s + end_s - begin_s, end_s
    return overlap_s


def _queued_s() -> float:
    """For how long this thread has waited for a processor."""
    return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
