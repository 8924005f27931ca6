"""Notices what hangs: steps that have all that they need, and do not get on."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

_CHECKS = 20
"""How often it looks within the bound, but no more often than `_MIN_TICK_S`."""
_MIN_TICK_S = 0.05


class Working(Protocol):
    """A step's run, as it is watched."""

    @property
    def computes(self) -> bool:
        """Whether it waits for nothing but its engine."""
        ...

    @property
    def heard(self) -> int:
        """How often the engine has said something of it."""
        ...


RunT = TypeVar("RunT", bound=Working)


class StallWatch(Generic[RunT]):
    """Watches the runs of one replica: the engine hangs where none gets on, and one alone where others do."""

    def __init__(
        self,
        runs: Callable[[], Sequence[RunT]],
        *,
        stall_s: float,
        queued: Callable[[], int],
        on_hung: Callable[[RunT], None],
    ) -> None:
        """`queued` says how many steps wait in the engine. `on_hung` is told, once, of each that hangs alone."""
        self._runs, self._stall_s, self._queued, self._on_hung = runs, stall_s, queued, on_hung
        self._heard: dict[RunT, int] = {}
        self._silent_s: dict[RunT, float] = {}
        self._hung = set[RunT]()

    async def wait_stalled(self) -> str:
        """Returns only if no step gets on for `stall_s` while one could, with the cause.

        What is slow and says nothing for so long is taken for hung: the bound is for the pipeline's owner to set. Time
        is counted in looks, so that a process that was stopped for a while is not thought to hang.
        """
        tick_s = max(_MIN_TICK_S, self._stall_s / _CHECKS)
        stuck_s = 0.0
        while True:
            await asyncio.sleep(tick_s)
            stuck_s = stuck_s + tick_s if self._look(tick_s) else 0.0
            if stuck_s >= self._stall_s:
                break
            for run, silent_s in self._silent_s.items():
                if silent_s >= self._stall_s and run not in self._hung:
                    self._hung.add(run)
                    self._on_hung(run)
        return (
            f"the engine hangs: {len(self._heard)} steps have what they need, and none has got on for "
            f"{self._stall_s:g} s (the stage's stall_s)"
        )

    def _look(self, tick_s: float) -> bool:
        """Notes how long each run has been silent; returns whether there are some, and all are."""
        former, self._heard = self._heard, {run: run.heard for run in self._runs() if run.computes}
        silent = {run for run, heard in self._heard.items() if former.get(run) == heard}
        # One of which nothing was ever heard may wait in the engine's queue.
        waits = self._queued() > 0
        self._silent_s = {run: self._silent_s.get(run, 0.0) + tick_s for run in silent if run.heard or not waits}
        # One that has come meanwhile, or was stopped for hanging, is no sign of life; one that got on, ended or waits
        # for its input is.
        is_stuck = bool(former) and former.keys() <= silent | self._hung
        self._hung &= self._heard.keys()
        return is_stuck
