import os
from itertools import count

from tests.soak.footprint import Sample, growth, sample

MB = 1 << 20


def _life(heaps_mb: list[float], *, files: list[int] | None = None, process_id: int = 1) -> list[Sample]:
    opened = files or [10] * len(heaps_mb)
    return [
        Sample("one", process_id, float(at), int(heap * MB), each)
        for at, heap, each in zip(count(), heaps_mb, opened, strict=False)
    ]


def test_only_processes_that_are_ready_are_measured() -> None:
    statuses = {state: {"state": state, "process_id": os.getpid()} for state in ("loading", "ready")}
    (measured,) = sample(statuses)
    assert measured.process == "ready"
    assert measured.heap_bytes > 1 << 20
    assert measured.files > 2


def test_a_constant_process_does_not_grow() -> None:
    assert growth(_life([50.0, 52.0, 49.0] * 10), warm_s=3) == []


def test_growing_memory_is_found() -> None:
    assert growth(_life([50.0 + at for at in range(30)]), warm_s=3) == ["one grew from at most 61.0 to 75.0 MB"]


def test_returning_callers_are_not_a_leak() -> None:
    assert growth(_life([41.0, 41.0, 50.0] + [41.0] * 7 + [51.0] * 20), warm_s=1) == []


def test_growth_of_a_warming_process_is_ignored() -> None:
    assert growth(_life([10.0 * at for at in range(10)] + [100.0] * 20), warm_s=10) == []


def test_files_that_stay_open_are_found() -> None:
    life = _life([50.0] * 30, files=[10 + 2 * at for at in range(30)])
    assert growth(life, warm_s=3) == ["one had at most 32 files open, then 60"]


def test_returning_peers_are_not_a_leak() -> None:
    files = [33, 33, 33, 33, 51, 33, 33, 33, 33] + [51] * 21
    assert growth(_life([50.0] * 30, files=files), warm_s=1) == []


def test_a_restarted_process_is_measured_separately() -> None:
    assert growth([*_life([50.0] * 10), *_life([90.0] * 10, process_id=2)], warm_s=1) == []
