"""Notices what hangs: steps that have all that they need, and do not get on."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

_CHECKS = 20
"""How often it looks within the bound, but no more often than `_MIN_TICK_S`."""
_MIN_TICK_S = 0.05
_OVERTAKEN = 64
"""How often a later step is heard that has overtaken a silent one. Engines serve in order or by turns: nobody in a
queue is overtaken so often, nor by those who are merely more urgent."""


class Working(Protocol):
    """A step's run, as it is watched."""

    @property
    def number(self) -> int:
        """Of runs, the later has the higher."""
        ...

    @property
    def priority(self) -> int:
        """The higher goes first."""
        ...

    @property
    def computes(self) -> bool:
        """Whether it waits for nothing but its engine."""
        ...

    @property
    def heard(self) -> int:
        """How often the engine has said something of it."""
        ...


RunT = TypeVar("RunT", bound=Working)


class _Silence(NamedTuple):
    """Of a run, since it was heard of last."""

    lasts_s: float
    heard_then: Mapping[int, int]
    """By number, how often each run had been heard."""


class StallWatch(Generic[RunT]):
    """Watches the runs of one replica: the engine hangs where none gets on, and one alone where later ones do."""

    def __init__(self, runs: Callable[[], Sequence[RunT]], *, stall_s: float, on_hung: Callable[[RunT], None]) -> None:
        """`on_hung` is told, once, of each run that hangs alone: it is to stop it."""
        self._runs, self._stall_s, self._on_hung = runs, stall_s, on_hung
        self._heard: Mapping[int, int] = {}
        self._working = set[int]()
        self._silent: dict[int, _Silence] = {}
        self._hung = set[int]()

    async def wait_stalled(self) -> str:
        """Returns only if no step gets on for `stall_s` while one could, or if one that hangs does not end, with the
        cause.

        What is slow and says nothing for so long is taken for hung: the bound is for the pipeline's owner to set. Time
        is counted in looks, so that a process that was stopped for a while is not thought to hang.
        """
        tick_s = max(_MIN_TICK_S, self._stall_s / _CHECKS)
        stuck_s = 0.0
        while True:
            await asyncio.sleep(tick_s)
            stuck_s = stuck_s + tick_s if self._look(tick_s) else 0.0
            bound = f"{self._stall_s:g} s (the stage's stall_s)"
            if stuck_s >= self._stall_s:
                count = len(self._working)
                return f"the engine hangs: {count} steps have what they need, and none has got on for {bound}"
            if any(self._silent[number].lasts_s >= 2 * self._stall_s for number in self._hung & self._silent.keys()):
                return f"the engine hangs: a step that it should have let go of has not ended for {bound}"

    def _look(self, tick_s: float) -> bool:
        """Notes how long each run has been silent, and tells of those that hang; returns whether all are silent."""
        runs = self._runs()
        working = {run.number: run for run in runs if run.computes}
        former, self._heard = self._heard, {run.number: run.heard for run in runs}
        worked, self._working = self._working, set(working)
        silent = {number for number in worked & self._working if former[number] == self._heard[number]}
        begun = _Silence(0.0, former)
        self._silent = {
            number: _Silence(since.lasts_s + tick_s, since.heard_then)
            for number in silent
            for since in [self._silent.get(number, begun)]
        }
        # One that has come meanwhile, or was stopped for hanging, is no sign of life; one that got on, ended or waits
        # for its input is.
        got_on = any(former.get(number, heard) != heard for number, heard in self._heard.items())
        is_stuck = bool(worked) and worked <= (silent | self._hung) and not got_on
        self._hung &= self._working
        if not is_stuck:
            for number in silent - self._hung:
                if self._hangs(working[number], runs):
                    self._hung.add(number)
                    self._on_hung(working[number])
        return is_stuck

    def _hangs(self, run: RunT, others: Iterable[RunT]) -> bool:
        since = self._silent[run.number]
        return since.lasts_s >= self._stall_s and any(
            other.heard - since.heard_then.get(other.number, 0) >= _OVERTAKEN
            for other in others
            if other.number > run.number and other.priority <= run.priority
        )
