"""Reads the memory and processor time of processes from the kernel."""

import os
from collections.abc import Iterator
from pathlib import Path

_KIB, _MB = 1 << 10, 1e6
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_USER_TIME = 11
"""The index of the user time in the fields of /proc/PID/stat after the name. The system time follows it."""


def own_mb(process_id: int) -> float:
    """Returns the memory of a process in bytes. Shared memory is divided among the processes that share it."""
    return _share_bytes(process_id) / _MB


def started_mb(process_id: int) -> float:
    """Returns the memory in bytes of all processes that a process started.

    It excludes multiprocessing's resource tracker (6 MB), because a process that multiprocessing itself has started
    uses its parent's tracker.
    """
    return sum(own_mb(each) for each in _started(process_id) if not _is_tracker(each))


def cpu_s(process_id: int) -> float:
    """Returns the processor time that a process has used, without its children's."""
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
