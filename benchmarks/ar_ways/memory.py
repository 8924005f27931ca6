"""What a process and those that it started take in memory."""

from collections.abc import Iterator
from pathlib import Path

KIB, MB = 1 << 10, 1e6


def tree_mb(process_id: int) -> float:
    """Their proportional share of memory in all: what several processes share is split among them."""
    return sum(_share_bytes(each) for each in _tree(process_id)) / MB


def _tree(process_id: int) -> Iterator[int]:
    yield process_id
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _tree(int(child))


def _share_bytes(process_id: int) -> int:
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * KIB
    raise ValueError(f"process {process_id} has no proportional share")
