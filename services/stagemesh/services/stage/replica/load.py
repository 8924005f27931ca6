"""The state and the load that a replica reports."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_KIB = 1024
_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")
_MEMORY_CURRENT = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")


class ReplicaState(Enum):
    """The state of a replica."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"


@dataclass(frozen=True)
class StageLoad:
    """A replica's load at one moment, with the fields of WatchLoadResponse."""

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


def free_memory_bytes() -> int:
    """Returns the host memory still available to this process, limited by its control group; 0 if unknown."""
    try:
        available = _available_bytes()
        limit = _MEMORY_MAX.read_text().strip() if _MEMORY_MAX.exists() else "max"
        if limit == "max":
            return available
        return max(0, min(available, int(limit) - int(_MEMORY_CURRENT.read_text())))
    except (OSError, ValueError):
        return 0


def _available_bytes() -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * _KIB
    return 0
