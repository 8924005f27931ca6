"""Notices that an engine hangs: steps have all that they need, and none of them gets on."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

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


class StallWatch:
    """Watches the runs of one replica."""

    def __init__(self, runs: Callable[[], Sequence[Working]], *, stall_s: float) -> None:
        self._runs, self._stall_s = runs, stall_s

    async def wait_stalled(self) -> str:
        """Returns only if no step gets on for `stall_s` while one could, with the cause.

        What is slow and says nothing for so long is taken for hung: the bound is for the pipeline's owner to set. Time
        is counted in looks, so that a process that was stopped for a while is not thought to hang.
        """
        tick_s = max(_MIN_TICK_S, self._stall_s / _CHECKS)
        former: dict[int, int] = {}
        stuck_s = 0.0
        while stuck_s < self._stall_s:
            await asyncio.sleep(tick_s)
            working = {id(run): run.heard for run in self._runs() if run.computes}
            # One that has come meanwhile is no sign of life; one that has got on, ended or waits for its input is.
            is_stuck = bool(former) and former.items() <= working.items()
            stuck_s = stuck_s + tick_s if is_stuck else 0.0
            former = working
        return (
            f"the engine hangs: {len(former)} steps have what they need, and none has got on for {self._stall_s:g} s "
            "(the stage's stall_s)"
        )
