"""Requests that take turns at every step get what the pipeline's own `__call__` makes, bit for bit."""

from pathlib import Path

import pytest
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.request_transfer import RequestTransfer
from tests.diffusion.tiny_calls import Wish, load, picture
from tests.diffusion.tiny_pipelines import WRITERS
from tests.diffusion.turns import inputs_of

pytestmark = pytest.mark.timeout(180)

WISHES = (
    Wish(),
    Wish(prompt="two dogs and a very long tail", seed=7, height=64, width=96, steps=6, scale=5.0),
    Wish(prompt="x", seed=3, height=96, width=64, steps=2, scale=2.0),
)


@pytest.fixture(params=WRITERS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(model: str, tmp_path: Path) -> Path:
    return WRITERS[model](tmp_path)


def state(model: str, wish: Wish) -> DiffusionRequestState:
    return DiffusionRequestState("r", inputs_of(model, wish))


def take_turns(pipeline: ModularStepPipeline, states: list[DiffusionRequestState]) -> list[torch.Tensor]:
    """One step of each, until all are done; each is decoded as soon as it is denoised."""
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


def test_three_in_turns_get_what_each_gets_alone(model: str, folder: Path) -> None:
    pipeline, classic = ModularStepPipeline(folder, torch.float32), load(folder)
    made = take_turns(pipeline, [state(model, wish) for wish in WISHES])
    for wish, one in zip(WISHES, made, strict=True):
        assert torch.equal(one, picture(model, classic, wish))


def test_a_request_goes_on_where_another_loaded_the_same_model(model: str, folder: Path) -> None:
    first, second = ModularStepPipeline(folder, torch.float32), ModularStepPipeline(folder, torch.float32)
    whole, moved = state(model, WISHES[1]), state(model, WISHES[1])
    first.prepare_encode(moved)
    for _ in range(3):
        (noise,) = first.denoise_step([moved])
        first.step_scheduler(moved, noise)
    packed = RequestTransfer(first, folder).pack_state(moved)
    there = RequestTransfer(second, folder).unpack_state("r", moved.inputs, packed)
    assert torch.equal(*(take_turns(pipeline, [one])[0] for pipeline, one in ((second, there), (first, whole))))


def test_a_model_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "DanceDiffusionPipeline"}')
    with pytest.raises(NotReadyError, match="holds a DanceDiffusionPipeline; the diffusion engine knows QwenImage"):
        ModularStepPipeline(tmp_path, torch.float32)
