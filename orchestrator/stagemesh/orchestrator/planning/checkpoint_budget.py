"""Limits the total size of the checkpoints that an orchestrator retains."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class _Checkpoint(NamedTuple):
    size_bytes: int
    drop: Callable[[], None]


class CheckpointBudget:
    """Limits the total size of the checkpoints that the orchestrator retains.

    If a replica terminates, the steps that ran on the replica resume from these checkpoints. The oldest checkpoints are
    dropped first. A step whose checkpoint was dropped restarts from the beginning. A checkpoint that was sent to a
    restarted step is not counted, because that checkpoint is part of the step's request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        """The total size of the retained checkpoints, in bytes."""
        self._limit_bytes = limit_bytes
        # By `id`, because owners need not be hashable. An owner stays alive at least until its checkpoint is released.
        self._checkpoints: OrderedDict[int, _Checkpoint] = OrderedDict()

    def keep(self, owner: object, size_bytes: int, *, drop: Callable[[], None]) -> bool:
        """Replaces the owner's checkpoint. Returns False if the new checkpoint alone exceeds the limit.

        If False is returned, the owner must not retain the new checkpoint. `drop` is called if newer checkpoints of
        other owners displace this checkpoint later.
        """
        self.release(owner)
        if size_bytes > self._limit_bytes:
            return False
        self._checkpoints[id(owner)] = _Checkpoint(size_bytes, drop)
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit_bytes:
            _, oldest = self._checkpoints.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
            oldest.drop()
        return True

    def release(self, owner: object) -> None:
        """Subtracts the size of the owner's checkpoint from the total. Does nothing if the owner has no checkpoint."""
        checkpoint = self._checkpoints.pop(id(owner), None)
        if checkpoint is not None:
            self.size_bytes -= checkpoint.size_bytes
