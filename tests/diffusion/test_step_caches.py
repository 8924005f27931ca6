"""Step caches: each request has its own cache state, which is transferred and freed with the request."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.services.engines.diffusion import STATE
from stagemesh.services.engines.diffusion.caches import CacheDitCaches
from stagemesh.services.engines.diffusion.options import DiffusionOptions, stage_options
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.diffusion.worker import DiffusionWorker
from tests.diffusion.pipeline_runs import run_to_end

pytestmark = pytest.mark.timeout(120)

# Chosen for the tiny models, so that some steps are skipped and others are computed.
THRESHOLDS = {"qwen-image": 0.48, "flux": 0.43, "wan": 0.107}
CACHES: Mapping[str, dict[str, Any]] = {
    "first_block": {"kind": "first_block"},
    "mag": {"kind": "mag", "threshold": 0.2, "retention_ratio": 0.1, "mag_ratios": [1.0, 1.02, 0.98, 1.1]},
    "taylor_seer": {"kind": "taylor_seer", "cache_interval": 3, "disable_cache_before_step": 1},
    "cache_dit": {"kind": "cache_dit", "threshold": 0.6, "warmup_steps": 2},
}
NAMES = ("one", "two")


CASES = [
    *(("qwen-image", kind) for kind in CACHES),
    ("flux", "first_block"),
    ("wan", "first_block"),
    # Its layers have other names than those of the other models.
    ("wan", "taylor_seer"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    model, kind = request.param
    return model, kind


@pytest.fixture(scope="module")
def folder(case: tuple[str, str], tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion(case[0])


@pytest.fixture(scope="module")
def frames(case: tuple[str, str]) -> int:
    return 5 if case[0] == "wan" else 1


@pytest.fixture(scope="module")
def worker(case: tuple[str, str], folder: Path) -> DiffusionWorker:
    model, kind = case
    threshold = {"threshold": THRESHOLDS[model]} if kind == "first_block" else {}
    return loaded(folder, CACHES[kind] | threshold)


def loaded(folder: Path, cache: Mapping[str, Any] | None) -> DiffusionWorker:
    worker = DiffusionWorker(folder, stage_options({"dtype": "float32", "step_cache": dict(cache) if cache else None}))
    worker.load()
    return worker


def inputs(name: str, frames: int = 1) -> DiffusionInputs:
    one = DiffusionInputs(
        1, "a cat", "blur", height=64, width=64, num_inference_steps=8, guidance_scale=3.0, num_frames=frames
    )
    two = DiffusionInputs(2, "two dogs", height=96, width=64, num_inference_steps=10, num_frames=frames)
    return {"one": one, "two": two}[name]


def alone(worker: DiffusionWorker, name: str, frames: int) -> NDArray[Any]:
    return np.array(run_to_end(worker.runner, inputs(name, frames)))


def step(worker: DiffusionWorker, name: str, times: int = 1) -> None:
    for _ in range(times):
        assert worker.step([name]) == [None]


def ended(worker: DiffusionWorker, name: str) -> NDArray[Any]:
    made = np.array(worker.runner.decode(name).frames)
    worker.drop(name)
    return made


def contexts(worker: DiffusionWorker) -> int:
    caches = worker.runner.pipeline.forwards.caches
    assert caches is not None
    if isinstance(caches, CacheDitCaches):
        return len(caches._contexts)
    return sum(len(manager._state_cache) for manager in caches._managers)


def test_alternating_requests_get_the_same_as_alone(worker: DiffusionWorker, frames: int) -> None:
    expected = [alone(worker, name, frames) for name in NAMES]
    for name in NAMES:
        worker.runner.begin(name, inputs(name, frames))
    for _ in range(8):
        for name in NAMES:
            step(worker, name)
    step(worker, "two", 2)
    assert all(np.array_equal(ended(worker, name), each) for name, each in zip(NAMES, expected, strict=True))


def test_a_cache_changes_the_image(worker: DiffusionWorker, folder: Path, frames: int) -> None:
    assert not np.array_equal(alone(worker, "one", frames), alone(loaded(folder, None), "one", frames))


def test_cache_state_is_freed_with_its_request(worker: DiffusionWorker, frames: int) -> None:
    worker.runner.begin("one", inputs("one", frames))
    step(worker, "one", 2)
    held = contexts(worker)
    alone(worker, "two", frames)
    assert held == contexts(worker) > 0
    worker.drop("one")
    assert contexts(worker) == 0


def test_a_finished_request_leaves_no_cache_state(worker: DiffusionWorker, frames: int) -> None:
    run_to_end(worker.runner, inputs("one", frames))
    assert contexts(worker) == 0


def test_cache_state_is_transferred_with_its_request(worker: DiffusionWorker, folder: Path, frames: int) -> None:
    expected = alone(worker, "one", frames)
    worker.runner.begin("one", inputs("one", frames))
    step(worker, "one", 4)
    caches = worker.runner.pipeline.forwards.caches
    assert caches is not None
    if isinstance(caches, CacheDitCaches):
        pytest.skip("its state cannot be transferred")
    other = DiffusionWorker(folder, DiffusionOptions(dtype="float32", step_cache=caches.options))
    other.load()
    other.runner.begin("moved", inputs("one", frames), state=worker.runner.serialize("one", STATE))
    step(other, "moved", 4)
    assert np.array_equal(ended(other, "moved"), expected)


def test_a_state_of_another_cache_is_rejected(qwen_image: Path) -> None:
    first, second = loaded(qwen_image, CACHES["first_block"]), loaded(qwen_image, None)
    first.runner.begin("one", inputs("one"))
    step(first, "one")
    with pytest.raises(InvalidChunkError, match="the state's step_cache is FirstBlockOptions"):
        second.runner.begin("one", inputs("one"), state=first.runner.serialize("one", STATE))


def test_a_model_without_cache_support_is_rejected(tiny_diffusion: Callable[[str], Path]) -> None:
    with pytest.raises(NotReadyError, match="SD3Transformer2DModel does not support the step cache first_block"):
        loaded(tiny_diffusion("sd3"), CACHES["first_block"])


def test_a_mag_cache_without_ratios_is_rejected(qwen_image: Path) -> None:
    with pytest.raises(NotReadyError, match="has no mag_ratios for this model; measure them"):
        loaded(qwen_image, {"kind": "mag"})
