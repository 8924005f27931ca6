"""The resources that processes hold: memory, open files, and entries in /dev/shm."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

WARM_S = 60.0
"""Seconds until a process is warm: an orchestrator keeps the outputs of ended requests for 30 s and grows until then.
"""
_FEWEST = 6
_INTERVAL_S = 2.0
_MB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """The resources of a process at one time."""

    process: str
    process_id: int
    at_s: float
    heap_bytes: int
    files: int


def sample(statuses: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """Measures all processes of a deployment except those that load or are about to end."""
    for name, status in list(statuses.items()):
        if status["state"] != "ready":
            continue
        process_id = status["process_id"]
        with suppress(OSError, ValueError):
            files = len(list(Path(f"/proc/{process_id}/fd").iterdir()))
            yield Sample(name, process_id, time.monotonic(), _heap_bytes(process_id), files)


@asynccontextmanager
async def sampling(statuses: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[list[Sample]]:
    """Measures the processes of a deployment all the time within the block. Yields the list of what was measured."""
    samples = list[Sample]()

    async def measure() -> None:
        while True:
            samples.extend(sample(statuses))
            await asyncio.sleep(_INTERVAL_S)

    measuring = asyncio.create_task(measure())
    try:
        yield samples
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


def _heap_bytes(process_id: int) -> int:
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {process_id} has ended")


def growth(samples: Sequence[Sample], *, warm_s: float = WARM_S) -> list[str]:
    """Returns a text for each process whose memory or number of open files grew since it was warm. Processes that did
    not live long enough are skipped.
    """
    lives = dict[tuple[str, int], list[Sample]]()
    for each in samples:
        lives.setdefault((each.process, each.process_id), []).append(each)
    return [problem for (name, _), life in lives.items() for problem in _growth_of(name, life, warm_s)]


def _growth_of(name: str, life: Sequence[Sample], warm_s: float) -> Iterator[str]:
    steady = [each for each in life if each.at_s >= life[0].at_s + warm_s]
    if len(steady) < _FEWEST:
        return
    third = len(steady) // 3
    # A process may take less at first because most of its callers are disconnected then.
    heap = max(each.heap_bytes for each in steady[:third])
    later_heap = median(each.heap_bytes for each in steady[-third:])
    if later_heap > heap * 1.05 + 4 * _MB:
        yield f"{name} grew from at most {heap / _MB:.1f} to {later_heap / _MB:.1f} MB"
    # A process may take fewer files at first because most of its peers are down then, and each peer takes some files.
    files, later_files = max(each.files for each in steady[:third]), median(each.files for each in steady[-third:])
    if later_files > files * 1.25 + 12:
        yield f"{name} had at most {files} files open, then {later_files:.0f}"


def shared_memory() -> frozenset[str]:
    """Returns the names in /dev/shm."""
    return frozenset(path.name for path in Path("/dev/shm").iterdir())
