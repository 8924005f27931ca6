"""Mutated inputs of every reader of foreign data. `make fuzz` sends 100,000 to each."""

import gc
import os
import random
import resource
import time
from pathlib import Path

import psutil
import pytest

from tests.fuzz.targets import TARGETS, mutated, seeds

FOUND = sorted((Path(__file__).parent / "found").iterdir())
"""Inputs for which a reader was repaired. Their names begin with that of the target."""
INPUTS = int(os.environ.get("STAGEMESH_FUZZ_MESSAGES", "1500"))
SEED = int(os.environ.get("STAGEMESH_FUZZ_SEED", "1"))
_SLOWEST_S = 10.0
"""The processor time above which one input counts as a hang, in seconds."""
_GROWTH_MB = 100
_MOST_MB = 400
"""The memory above which one input counts as a bomb. A decoder of video allocates frames before their size is known."""

pytestmark = pytest.mark.timeout(60 + INPUTS // 20)


@pytest.mark.parametrize("target", TARGETS)
def test_valid_seeds_are_accepted(target: str) -> None:
    accepted = [TARGETS[target](seed) for seed in seeds(target)]
    assert accepted[0], "mutations of seeds that are not accepted would not reach beyond the first checks"
    assert target not in {"media", "state", "fragment"} or all(accepted)


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_input_raises_no_other_error(target: str) -> None:
    rng, read = random.Random(SEED), TARGETS[target]
    for _ in range(200):
        read(mutated(target, rng))
    before_peak_mb = _peak_mb()
    # Threads of earlier tests in this process may allocate memory meanwhile. A leak would grow both times.
    assert any(_growth_mb(target, rng) < _GROWTH_MB for _ in range(2))
    assert _peak_mb() - before_peak_mb < _MOST_MB


def _growth_mb(target: str, rng: random.Random) -> float:
    """Reads mutated inputs, and returns how much the memory of this process grows."""
    read, before_mb = TARGETS[target], _memory_mb()
    for number in range(INPUTS):
        data = mutated(target, rng)
        began_s = time.process_time()
        try:
            read(data)
        except BaseException as exc:
            raise AssertionError(f"input {number} of seed {SEED}: {data.hex()}") from exc
        took_s = time.process_time() - began_s
        assert took_s < _SLOWEST_S, f"input {number} of seed {SEED} took {took_s:.1f} s: {data.hex()}"
    gc.collect()
    return _memory_mb() - before_mb


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_fuzzing_has_found_is_read_quickly(path: Path) -> None:
    read = TARGETS[path.name.partition("-")[0]]
    began_s = time.process_time()
    read(path.read_bytes())
    assert time.process_time() - began_s < _SLOWEST_S


def _memory_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
