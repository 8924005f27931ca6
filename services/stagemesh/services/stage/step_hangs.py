"""Detects hangs: a step hangs if it has all of its input but makes no progress."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stagemesh.services.stage.step.run import StepRun

_CHECKS = 20
"""The number of checks for hangs within the time limit `stall_s`. Determines the interval between two checks, which is
at least `_MIN_TICK_S` seconds."""
_MIN_TICK_S = 0.05
_OVERTAKEN = 64
"""The number of events of a later step at which an earlier step counts as hung, if the earlier step has received no
events for `stall_s` seconds. A step that only waits in the engine's queue is not overtaken by this number of events,
because engines run tasks in order or in turns. Later steps with a higher priority are ignored."""


class _Silence(NamedTuple):
    """A period, measured in checks, in which a run receives no events from the engine."""

    lasts_s: float
    counts_then: Mapping[int, int]
    """The number of events that each run had received when the period started, by run number."""


class StallWatch:
    """Watches the runs of one replica for hangs.

    If no run makes progress, the engine counts as hung. If one run makes no progress while later runs make progress,
    only that run counts as hung.
    """

    def __init__(
        self, runs: Callable[[], Sequence[StepRun]], *, stall_s: float, on_hung: Callable[[StepRun], None]
    ) -> None:
        """`runs` returns the runs that have not ended. `stall_s` is the time limit for a run without events, in
        seconds.

        `on_hung` is called once for each run that hangs while later runs make progress. The callback must stop the run.
        """
        self._runs, self._stall_s, self._on_hung = runs, stall_s, on_hung
        self._event_counts: Mapping[int, int] = {}
        self._working = set[int]()
        self._silent: dict[int, _Silence] = {}
        self._hung = set[int]()

    async def wait_stalled(self) -> str:
        """Waits until the engine hangs. Returns the cause as a sentence for operators.

        The engine hangs if no step has made progress for `stall_s` seconds, or if a step that was stopped for a hang
        has still not ended `stall_s` seconds later. A slow step without an event for `stall_s` seconds also counts as
        hung, so the pipeline's owner must set a sufficient limit. Time is counted in checks, so that a process that was
        suspended for a while does not count as hung.
        """
        tick_s = max(_MIN_TICK_S, self._stall_s / _CHECKS)
        stuck_s = 0.0
        while True:
            await asyncio.sleep(tick_s)
            stuck_s = stuck_s + tick_s if self._check(tick_s) else 0.0
            bound = f"{self._stall_s:g} s (the stage's stall_s)"
            if stuck_s >= self._stall_s:
                count = len(self._working)
                steps = "1 step has its input" if count == 1 else f"{count} steps have their input"
                return f"the engine hangs: {steps}, but none has made progress for {bound}"
            if any(self._silent[number].lasts_s >= 2 * self._stall_s for number in self._hung & self._silent.keys()):
                return f"the engine hangs: a stopped step has not ended for {bound}"

    def _check(self, tick_s: float) -> bool:
        """Updates each run's period without events. Returns True if no run has made progress since the previous check.

        Otherwise calls `on_hung` for each run that hangs. `tick_s` is the time since the previous check, in seconds.
        """
        runs = self._runs()
        working = {run.number: run for run in runs if run.computes}
        before, self._event_counts = self._event_counts, {run.number: run.event_count for run in runs}
        worked, self._working = self._working, set(working)
        silent = {number for number in worked & self._working if before[number] == self._event_counts[number]}
        started = _Silence(0.0, before)
        self._silent = {
            number: _Silence(since.lasts_s + tick_s, since.counts_then)
            for number in silent
            for since in [self._silent.get(number, started)]
        }
        # A run that had an event, has ended, or waits for input proves progress. A new run, or a run that was stopped
        # for a hang, does not.
        progressed = any(before.get(number, count) != count for number, count in self._event_counts.items())
        is_stuck = bool(worked) and worked <= (silent | self._hung) and not progressed
        self._hung &= self._working
        if not is_stuck:
            for number in silent - self._hung:
                if self._hangs(working[number], runs):
                    self._hung.add(number)
                    self._on_hung(working[number])
        return is_stuck

    def _hangs(self, run: StepRun, others: Iterable[StepRun]) -> bool:
        since = self._silent[run.number]
        return since.lasts_s >= self._stall_s and any(
            other.event_count - since.counts_then.get(other.number, 0) >= _OVERTAKEN
            for other in others
            if other.number > run.number and other.priority <= run.priority
        )
