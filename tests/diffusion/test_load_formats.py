"""What a stage's model is made from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.diffusion.runner import DiffusionRunner
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from tests.diffusion.tiny_pipelines import WRITERS

pytestmark = pytest.mark.timeout(120)


class Still(ModularStepPipeline):
    """Sees no noise."""

    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor]:
        return [torch.zeros_like(state.latents) for state in batch]


def runner(folder: Path, **load: Any) -> DiffusionRunner:
    return DiffusionRunner(folder, stage_options({"dtype": "float32", "load": load}), torch.device("cpu"))


def inputs(**more: Any) -> DiffusionInputs:
    return DiffusionInputs(1, "a cat", height=64, width=64, num_inference_steps=2, **more)


@pytest.mark.parametrize("name", WRITERS)
def test_a_dummy_reads_no_weights_and_is_the_same_each_time(name: str, tmp_path: Path) -> None:
    folder = WRITERS[name](tmp_path)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    wanted = inputs(num_frames=5 if name == "wan" else 1)
    first, second = (runner(folder, format="dummy").execute_model(wanted) for _ in range(2))
    assert first.shape[1:] == (3, 64, 64)
    assert np.array_equal(first, second)


def test_a_dummy_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    folder = WRITERS["flux"](tmp_path)
    before = torch.get_rng_state()
    runner(folder, format="dummy")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pipeline_of_ones_own_goes_through_the_phases(tmp_path: Path) -> None:
    folder = WRITERS["qwen-image"](tmp_path)
    own = runner(folder, format="custom_pipeline", custom_pipeline=f"{__name__}:Still")
    state = DiffusionRequestState("r", inputs())
    own.prepare(state)
    noise = state.latents.clone()
    assert own.step([state]) == [None]
    assert torch.equal(state.latents, noise)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no.such.module:Still", "cannot be imported: No module named 'no'; write it as module:Class"),
        (f"{__name__}:Moving", "has no attribute 'Moving'"),
        (f"{__name__}:runner", "is no kind of ModularStepPipeline"),
    ],
)
def test_what_is_no_pipeline_is_refused(name: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=error):
        runner(tmp_path, format="custom_pipeline", custom_pipeline=name)


def test_a_class_without_its_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"names a class for load\.format custom_pipeline"):
        stage_options({"load": {"custom_pipeline": "a:B"}})
