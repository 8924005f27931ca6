"""Total size limit for the checkpoint states that an orchestrator keeps."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class _KeptState(NamedTuple):
    size_bytes: int
    drop: Callable[[], None]


class StateBudget:
    """Limits the total size of the states that steps can resume from if their replica is lost.

    The oldest states are dropped first. A step whose state is dropped restarts from its beginning if it is lost. A
    state that a restarted step was sent is not counted, because it is part of that step's request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        """Total size of the kept states."""
        self._limit_bytes = limit_bytes
        # By `id`, because owners need not be hashable. An owner stays alive at least until its state is released.
        self._states: OrderedDict[int, _KeptState] = OrderedDict()

    def keep(self, owner: object, size_bytes: int, *, drop: Callable[[], None]) -> bool:
        """Replaces the owner's state. Returns False if the new state alone exceeds the limit and must not be kept.

        `drop` is called when the state is dropped because of newer states of other owners.
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
