"""Limits the total size of the checkpoints that an orchestrator retains."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class _KeptState(NamedTuple):
    size_bytes: int
    drop: Callable[[], None]


class StateBudget:
    """Limits the total bytes of the checkpoints from which steps can resume if their replicas terminate.

    The oldest checkpoints are dropped first. A step whose checkpoint was dropped restarts from its beginning if its
    replica terminates. A checkpoint that was sent to a restarted step is not counted, because it is part of the step's
    request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        """The total size of the retained checkpoints in bytes."""
        self._limit_bytes = limit_bytes
        # By `id`, because owners need not be hashable. An owner stays alive at least until its state is released.
        self._states: OrderedDict[int, _KeptState] = OrderedDict()

    def keep(self, owner: object, size_bytes: int, *, drop: Callable[[], None]) -> bool:
        """Replaces the owner's checkpoint. Returns False if the new checkpoint alone exceeds the limit.

        In that case, the owner must not retain the checkpoint. `drop` is called if the checkpoint is later displaced by
        newer checkpoints of other owners.
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
        """Removes the owner's checkpoint from the total size. Does nothing if the owner has none."""
        state = self._states.pop(id(owner), None)
        if state is not None:
            self.size_bytes -= state.size_bytes
