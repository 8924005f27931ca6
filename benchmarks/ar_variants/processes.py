"""Memory and processor time of processes, from the kernel."""

import time
from collections.abc import Iterator
from pathlib import Path

_KIB, _MB = 1 << 10, 1e6


def own_mb(process_id: int) -> float:
    """Returns the proportional memory of a process in MB: shared memory is divided among its users."""
    return _share_bytes(process_id) / _MB


def started_mb(process_id: int) -> float:
    """Returns the proportional memory of all processes that a process started, in MB.

    Skips multiprocessing's resource tracker (6 MB), because a process that multiprocessing has started uses its
    parent's.
    """
    return sum(own_mb(each) for each in _started(process_id) if not _is_tracker(each))


def cpu_s(process_id: int) -> float:
    """Returns the processor time of a process without its children, to the nanosecond.

    The times in /proc/PID/stat would be multiples of 10 ms.
    """
    # The kernel's number of a process's processor clock (clock_getcpuclockid).
    return time.clock_gettime(~process_id << 3 | 2)


def _started(process_id: int) -> Iterator[int]:
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _started(child)


def _is_tracker(process_id: int) -> bool:
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{process_id}/cmdline").read_bytes()


def _share_bytes(process_id: int) -> int:
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * _KIB
    raise ValueError(f"process {process_id} has no proportional share")
