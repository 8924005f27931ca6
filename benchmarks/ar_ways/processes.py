"""What the kernel knows of processes."""

import os
from collections.abc import Iterator
from pathlib import Path

_KIB, _MB = 1 << 10, 1e6
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_USER_TIME = 11
"""Among the fields of /proc/PID/stat after the name; the system's time follows."""


def own_mb(process_id: int) -> float:
    """The memory of a process; what several share is split among them."""
    return _share_bytes(process_id) / _MB


def started_mb(process_id: int) -> float:
    """The same of all that a process started.

    Without multiprocessing's resource tracker (6 MB): a process that multiprocessing itself has started uses that of
    its parent.
    """
    return sum(own_mb(each) for each in _started(process_id) if not _is_tracker(each))


def cpu_s(process_id: int) -> float:
    """Processor time that a process has used, its children's not counted."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_USER_TIME]) + int(fields[_USER_TIME + 1])) * _TICK_S


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
