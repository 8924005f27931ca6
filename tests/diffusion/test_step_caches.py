"""Step caches: each request has its own cache state, which is transferred and freed with the request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.services.engines.diffusion import STATE
from stagemesh.services.engines.diffusion.caches import CacheDitCaches
from stagemesh.services.engines.diffusion.options import DiffusionOptions, stage_options
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.diffusion.worker import DiffusionWorker
from tests.diffusion.pipeline_runs import run_to_end
from tests.diffusion.tiny.pipelines import WRITERS

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


@pytest.fixture(scope="module", params=THRESHOLDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module", params=CACHES)
def worker(request: pytest.FixtureRequest, folder: Path) -> DiffusionWorker:
    threshold = {"threshold": THRESHOLDS[folder.name]} if request.param == "first_block" else {}
    return loaded(folder, CACHES[request.param] | threshold)


def loaded(folder: Path, cache: Mapping[str, Any] | None) -> DiffusionWorker:
    worker = DiffusionWorker(folder, options(cache))
    worker.load()
    return worker


def options(cache: Mapping[str, Any] | None) -> DiffusionOptions:
    return stage_options({"dtype": "float32", "step_cache": dict(cache) if cache else None})


def inputs(name: str, folder: Path) -> DiffusionInputs:
    frames = 5 if folder.name == "wan" else 1
    one = DiffusionInputs(
        1, "a cat", "blur", height=64, width=64, num_inference_steps=8, guidance_scale=3.0, num_frames=frames
    )
    two = DiffusionInputs(2, "two dogs", height=96, width=64, num_inference_steps=10, num_frames=frames)
    return {"one": one, "two": two}[name]


def alone(worker: DiffusionWorker, name: str, folder: Path) -> NDArray[Any]:
    worker.runner.begin(name, inputs(name, folder))
    step(worker, name, inputs(name, folder).num_inference_steps)
    return ended(worker, name)


def step(worker: DiffusionWorker, name: str, times: int = 1) -> None:
    for _ in range(times):
        assert worker.step([name]) == [None]


def ended(worker: DiffusionWorker, name: str) -> NDArray[Any]:
    made = np.array(worker.runner.decode(name))
    worker.drop(name)
    return made


def contexts(worker: DiffusionWorker) -> int:
    caches = worker.runner.pipeline.forwards.caches
    assert caches is not None
    if isinstance(caches, CacheDitCaches):
        return len(caches._contexts)
    return sum(len(manager._state_cache) for manager in caches._managers)


def test_alternating_requests_get_the_same_as_alone(worker: DiffusionWorker, folder: Path) -> None:
    expected = [alone(worker, name, folder) for name in NAMES]
    for name in NAMES:
        worker.runner.begin(name, inputs(name, folder))
    for _ in range(8):
        for name in NAMES:
            step(worker, name)
    step(worker, "two", 2)
    assert all(np.array_equal(ended(worker, name), each) for name, each in zip(NAMES, expected, strict=True))


def test_a_cache_changes_the_image(worker: DiffusionWorker, folder: Path) -> None:
    assert not np.array_equal(alone(worker, "one", folder), alone(loaded(folder, None), "one", folder))


def test_cache_state_is_freed_with_its_request(worker: DiffusionWorker, folder: Path) -> None:
    worker.runner.begin("one", inputs("one", folder))
    step(worker, "one", 2)
    held = contexts(worker)
    alone(worker, "two", folder)
    assert held == contexts(worker) > 0
    worker.drop("one")
    assert contexts(worker) == 0


def test_a_finished_request_leaves_no_cache_state(worker: DiffusionWorker, folder: Path) -> None:
    run_to_end(worker.runner, inputs("one", folder))
    assert contexts(worker) == 0


def test_cache_state_is_transferred_with_its_request(worker: DiffusionWorker, folder: Path) -> None:
    expected = alone(worker, "one", folder)
    worker.runner.begin("one", inputs("one", folder))
    step(worker, "one", 4)
    caches = worker.runner.pipeline.forwards.caches
    assert caches is not None
    if isinstance(caches, CacheDitCaches):
        pytest.skip("its state cannot be transferred")
    other = DiffusionWorker(folder, DiffusionOptions(dtype="float32", step_cache=caches.options))
    other.load()
    other.runner.begin("moved", inputs("one", folder), state=worker.runner.serialize("one", STATE))
    step(other, "moved", 4)
    assert np.array_equal(ended(other, "moved"), expected)


def test_a_state_of_another_cache_is_rejected(tmp_path: Path) -> None:
    folder = WRITERS["qwen-image"](tmp_path)
    first, second = loaded(folder, CACHES["first_block"]), loaded(folder, None)
    first.runner.begin("one", inputs("one", folder))
    step(first, "one")
    with pytest.raises(InvalidChunkError, match="the state's step_cache is FirstBlockOptions"):
        second.runner.begin("one", inputs("one", folder), state=first.runner.serialize("one", STATE))


def test_a_model_without_cache_support_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="SD3Transformer2DModel does not support the step cache first_block"):
        loaded(WRITERS["sd3"](tmp_path), CACHES["first_block"])


def test_a_mag_cache_without_ratios_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="has no mag_ratios for this model; measure them"):
        loaded(WRITERS["qwen-image"](tmp_path), {"kind": "mag"})


@pytest.mark.parametrize(
    ("cache", "error"),
    [
        ({"kind": "tea"}, "kind"),
        ({"kind": "mag", "max_skip_steps": 0}, "max_skip_steps is 0: Input should be greater than 0"),
        (
            {"kind": "first_block", "threshold": float("nan")},
            "threshold is nan: Input should be greater than or equal to 0",
        ),
        ({"kind": "first_block", "limit": 1}, "limit"),
    ],
)
def test_an_invalid_cache_parameter_is_rejected(cache: Mapping[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        options(cache)
