"""The state and the load that a replica reports."""

from dataclasses import dataclass
from enum import Enum


class ReplicaState(Enum):
    """The state of a replica, as reported to orchestrators and operators."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"


@dataclass(frozen=True)
class StageLoad:
    """The load of a replica at one moment. Has the same fields as the message WatchLoadResponse."""

    running: int
    queued: int
    work_s: float
    arena_used_bytes: int
    arena_size_bytes: int
    credit_bytes: int
    free_memory_bytes: int
    arena_largest_free_bytes: int
    arena_waiting: int
    landing_used_bytes: int
    landing_size_bytes: int
