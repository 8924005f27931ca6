"""Mutated inputs of every reader of foreign data. `make fuzz` sends 100,000 to each."""

import gc
import os
import random
import resource
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

import psutil
import pytest

from tests.fuzz.messages import mutated
from tests.fuzz.targets import TARGETS, seeds

FOUND = sorted((Path(__file__).parent / "found").iterdir())
"""Inputs for which a reader was repaired. Their names begin with that of the target."""
INPUTS = int(os.environ.get("STAGEMESH_FUZZ_MESSAGES", "1500"))
SEED = int(os.environ.get("STAGEMESH_FUZZ_SEED", "1"))
_SLOWEST_S = 10.0
"""The processor time above which one input counts as a hang, in seconds."""
_GROWTH_MB = 100
_MOST_MB = 400
"""The memory above which one input counts as a bomb. A decoder of video allocates frames before their size is known."""

_LIMIT_S = 50 + INPUTS // 20

pytestmark = pytest.mark.timeout(_LIMIT_S + 10)


@pytest.mark.parametrize("target", TARGETS)
def test_valid_seeds_are_accepted(target: str) -> None:
    accepted = [TARGETS[target](seed) for seed in seeds(target)]
    assert accepted[0], "mutations of seeds that are not accepted would not reach beyond the first checks"
    assert target not in {"media", "state", "fragment"} or all(accepted)


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    """A process whose memory no other test uses."""
    with get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_input_raises_no_other_error(target: str, process: Pool) -> None:
    # If an input ends the process, its result never comes.
    growth_mb, peak_growth_mb = process.apply_async(_read_mutated, (target,)).get(timeout=_LIMIT_S)
    assert growth_mb < _GROWTH_MB
    assert peak_growth_mb < _MOST_MB


def _read_mutated(target: str) -> tuple[float, float]:
    """Reads mutated inputs. Returns how much the memory of this process and its peak have grown, in MB."""
    rng, read = random.Random(SEED), TARGETS[target]
    for _ in range(200):
        read(mutated(seeds(target), rng))
    before_mb, before_peak_mb = _memory_mb(), _peak_mb()
    for number in range(INPUTS):
        data = mutated(seeds(target), rng)
        began_s = time.process_time()
        try:
            read(data)
        except BaseException as exc:
            raise AssertionError(f"input {number} of seed {SEED}: {data.hex()}") from exc
        took_s = time.process_time() - began_s
        assert took_s < _SLOWEST_S, f"input {number} of seed {SEED} took {took_s:.1f} s: {data.hex()}"
    gc.collect()
    return _memory_mb() - before_mb, _peak_mb() - before_peak_mb


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
