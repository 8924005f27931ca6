"""Requests that alternate at every step get the same bits as from the pipeline's own `__call__`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion import STATE
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.request_transfer import RequestTransfer
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from tests.diffusion.pipeline_runs import inputs_of
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = pytest.mark.timeout(180)

SPECS = (
    ImageSpec(),
    ImageSpec(prompt="two dogs and a very long tail", seed=7, height=64, width=96, steps=6, scale=5.0),
    ImageSpec(prompt="x", seed=3, height=96, width=64, steps=2, scale=2.0),
)


@pytest.fixture(params=WRITERS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(model: str, tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion(model)


def state(model: str, spec: ImageSpec) -> DiffusionRequestState:
    return DiffusionRequestState("r", inputs_of(model, spec))


def take_turns(pipeline: ModularStepPipeline, states: list[DiffusionRequestState]) -> list[torch.Tensor]:
    """Alternates between requests at each step. Decodes each request after its last step."""
    made: dict[int, torch.Tensor] = {}
    while len(made) < len(states):
        for number, one in enumerate(states):
            if number in made:
                continue
            if not one.total_steps:
                pipeline.prepare_encode(one)
            (noise,) = pipeline.denoise_step([one])
            pipeline.step_scheduler(one, noise)
            if one.denoised:
                made[number] = pipeline.post_decode(one)
    return [made[number] for number in range(len(states))]


def test_three_alternating_requests_match_the_call(model: str, folder: Path) -> None:
    pipeline, classic = ModularStepPipeline(folder, DiffusionOptions(dtype="float32")), load(folder)
    made = take_turns(pipeline, [state(model, spec) for spec in SPECS])
    for spec, one in zip(SPECS, made, strict=True):
        assert torch.equal(one, classic_image(model, classic, spec))


def test_a_request_resumes_on_another_pipeline_of_the_same_model(model: str, folder: Path) -> None:
    first, second = (
        ModularStepPipeline(folder, DiffusionOptions(dtype="float32")),
        ModularStepPipeline(folder, DiffusionOptions(dtype="float32")),
    )
    whole, moved = state(model, SPECS[1]), state(model, SPECS[1])
    first.prepare_encode(moved)
    for _ in range(3):
        (noise,) = first.denoise_step([moved])
        first.step_scheduler(moved, noise)
    packed = RequestTransfer(first, folder).serialize(moved, STATE)
    there = RequestTransfer(second, folder).restore_state("r", moved.inputs, packed)
    assert torch.equal(*(take_turns(pipeline, [one])[0] for pipeline, one in ((second, there), (first, whole))))


def test_an_unsupported_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "DanceDiffusionPipeline"}')
    with pytest.raises(
        NotReadyError, match="contains a DanceDiffusionPipeline; the diffusion engine supports QwenImage"
    ):
        ModularStepPipeline(tmp_path, DiffusionOptions(dtype="float32"))
