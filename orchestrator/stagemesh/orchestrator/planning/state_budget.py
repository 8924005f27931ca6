"""Limits the total size of the checkpoint states that an orchestrator retains."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class _KeptState(NamedTuple):
    size_bytes: int
    drop: Callable[[], None]


class StateBudget:
    """Limits the total size of the states from which steps can resume if their replica terminates.

    The oldest states are dropped first. A step whose state was dropped restarts from its beginning if its replica
    terminates. A state that was sent to a restarted step is not counted, because it is part of the step's request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        """The total size of the retained states in bytes."""
        self._limit_bytes = limit_bytes
        # By `id`, because owners need not be hashable. An owner stays alive at least until its state is released.
        self._states: OrderedDict[int, _KeptState] = OrderedDict()

    def keep(self, owner: object, size_bytes: int, *, drop: Callable[[], None]) -> bool:
        """Replaces the owner's state. Returns False if the new state alone exceeds the limit and must not be retained.

        `drop` is called if newer states of other owners displace the state.
        """
        self.release(owner)
        if size_bytes > self._limit_bytes:
            return False
        self._states[id(owner)] = _KeptState(size_bytes, drop)
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit_bytes:
            _, oldest = self._states.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
            oldest.drop()
        return True

    def release(self, owner: object) -> None:
        """Removes the owner's state from the budget. Does nothing if the owner has none."""
        state = self._states.pop(id(owner), None)
        if state is not None:
            self.size_bytes -= state.size_bytes
