"""The growth of the memory of processes.

The memory is RssAnon plus RssShmem of /proc/PID/status: the resident memory of a process without the pages of files.
"""

import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SAMPLE_S = 0.002


@contextmanager
def growth(process_ids: Mapping[str, int]) -> Generator[Callable[[str], int]]:
    """Samples the memory of processes, by name, during the block, every 2 ms.

    Yields a function that returns the growth of a process in bytes: its highest memory so far, minus its memory at the
    start of the block.
    """
    before = {name: memory_bytes(each) for name, each in process_ids.items()}
    most, is_over = dict(before), threading.Event()

    def sample() -> None:
        while not is_over.wait(_SAMPLE_S):
            for name, each in process_ids.items():
                most[name] = max(most[name], memory_bytes(each))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield lambda name: most[name] - before[name]
    finally:
        is_over.set()
        sampler.join()


def memory_bytes(process_id: int) -> int:
    """Returns the memory of a process in bytes."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return sum(1024 * int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))
