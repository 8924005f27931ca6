"""The load formats of a stage's model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from stagemesh.services.engines.diffusion.worker import DiffusionRunner
from tests.diffusion.pipeline_runs import run_to_end
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = pytest.mark.timeout(120)


class Still(ModularStepPipeline):
    """Predicts zero noise."""

    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor]:
        return [torch.zeros_like(state.loop.latents) for state in batch]


def runner(folder: Path, **load: Any) -> DiffusionRunner:
    return DiffusionRunner(folder, stage_options({"dtype": "float32", "load": load}), torch.device("cpu"))


def inputs(**more: Any) -> DiffusionInputs:
    return DiffusionInputs(1, "a cat", height=64, width=64, num_inference_steps=2, **more)


@pytest.mark.parametrize("name", WRITERS)
def test_a_dummy_reads_no_weights_and_is_reproducible(name: str, tmp_path: Path) -> None:
    folder = WRITERS[name](tmp_path)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    wanted = inputs(num_frames=5 if name.startswith("wan") else 1)
    first, second = (run_to_end(runner(folder, format="dummy"), wanted) for _ in range(2))
    assert first.shape[1:] == (3, 64, 64)
    assert np.array_equal(first, second)


def test_a_dummy_does_not_change_the_global_random_state(tmp_path: Path) -> None:
    folder = WRITERS["flux"](tmp_path)
    before = torch.get_rng_state()
    runner(folder, format="dummy")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_custom_pipeline_runs_the_phases(tmp_path: Path) -> None:
    own = runner(WRITERS["qwen-image"](tmp_path), format="custom_pipeline", custom_pipeline=f"{__name__}:Still")
    own.begin("r", inputs())
    state = own.states["r"]
    noise = state.loop.latents.clone()
    assert own.step(["r"]) == [None]
    assert torch.equal(state.loop.latents, noise)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no.such.module:Still", "cannot be imported: No module named 'no'; write it as module:Class"),
        (f"{__name__}:Moving", "has no attribute 'Moving'"),
        (f"{__name__}:runner", "is not a subclass of ModularStepPipeline"),
    ],
)
def test_an_invalid_custom_pipeline_is_rejected(name: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=error):
        runner(tmp_path, format="custom_pipeline", custom_pipeline=name)
