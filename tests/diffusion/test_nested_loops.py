"""A denoising loop that contains a loop runs by its own code, suspended after each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HeliosModularPipeline

from stagemesh.common.errors import NotReadyError, UnsupportedError
from stagemesh.services.engines.diffusion import LATENTS, STATE
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.request_transfer import RequestTransfer
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from stagemesh.services.engines.diffusion.worker import DiffusionRunner
from tests.diffusion.test_steps import take_turns
from tests.diffusion.tiny.pipelines import write_helios

pytestmark = pytest.mark.timeout(180)

# A chunk has 33 frames.
ONE_CHUNK = DiffusionInputs(1, "a red cube", height=32, width=32, num_frames=9, num_inference_steps=3)
TWO_CHUNKS = DiffusionInputs(2, "two dogs", height=32, width=48, num_frames=37, num_inference_steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_helios(tmp_path_factory.mktemp("helios"))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> ModularStepPipeline:
    return ModularStepPipeline(folder, DiffusionOptions(dtype="float32"))


def own_call(folder: Path, inputs: DiffusionInputs) -> torch.Tensor:
    """Returns the video of the modular pipeline's own `__call__`."""
    whole: Any = HeliosModularPipeline(pretrained_model_name_or_path=str(folder))
    whole.load_components(dtype=torch.float32)
    whole.guider.guidance_scale = inputs.guidance_scale
    names = ("prompt", "height", "width", "num_frames", "num_inference_steps")
    generator = torch.Generator().manual_seed(inputs.seed)
    video: torch.Tensor = whole(
        **{name: getattr(inputs, name) for name in names}, generator=generator, output_type="pt", output="videos"
    )
    return video


def test_alternating_requests_equal_the_call(folder: Path, pipeline: ModularStepPipeline) -> None:
    states = [DiffusionRequestState(str(i), inputs) for i, inputs in enumerate((ONE_CHUNK, TWO_CHUNKS))]
    made = take_turns(pipeline, states)
    assert [state.total_steps for state in states] == [3, 4]
    for inputs, one in zip((ONE_CHUNK, TWO_CHUNKS), made, strict=True):
        assert torch.equal(one, own_call(folder, inputs))


@pytest.mark.parametrize("kind", [STATE, LATENTS])
def test_a_request_within_its_loop_cannot_be_transferred(
    kind: str, folder: Path, pipeline: ModularStepPipeline
) -> None:
    state = DiffusionRequestState("r", ONE_CHUNK)
    pipeline.prepare_encode(state)
    pipeline.step_scheduler(state, *pipeline.denoise_step([state]))
    with pytest.raises(UnsupportedError, match="loop"):
        RequestTransfer(pipeline, folder).serialize(state, kind)
    state.close()
    assert state.call is not None
    assert state.call.ended


@pytest.mark.parametrize("option", ["checkpoint_steps", "preview_steps"])
def test_options_that_need_the_state_of_a_step_are_refused(option: str, folder: Path) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(NotReadyError, match="checkpoint_steps and preview_steps need"):
        DiffusionRunner(folder, DiffusionOptions(dtype="float32", **options), torch.device("cpu"))


def test_a_dropped_request_ends_its_call(folder: Path) -> None:
    runner = DiffusionRunner(folder, DiffusionOptions(dtype="float32"), torch.device("cpu"))
    assert runner.begin("r", TWO_CHUNKS).total_steps == 4
    assert runner.step(["r"]) == [None]
    call = runner.states["r"].call
    runner.drop("r")
    assert call is not None
    assert call.ended
