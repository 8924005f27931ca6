"""A pipeline in three services, each with its own folders: together they make what `__call__` makes."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.client import Client, Progress, TensorOutput
from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, StagemeshError
from stagemesh.common.tensors import Array
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import Part
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.request_transfer import RequestTransfer
from tests.deployment import Deployment, deployed, eventually
from tests.diffusion.stages import diffusion_config, md5
from tests.diffusion.tiny_calls import Wish, load, picture
from tests.diffusion.tiny_pipelines import WRITERS, write_qwen_image
from tests.diffusion.turns import inputs_of
from tests.engines.support import collect

pytestmark = pytest.mark.timeout(240)

WISH = Wish(prompt="two dogs and a long tail", seed=7, height=64, width=96, steps=5, scale=3.0)
PREVIEW_STEPS = 2
PIPELINE = """\
pipeline: parts
stages:
  encoder:
    engine: diffusion
    model: {model}
    options: {{part: encode, dtype: float32, device: cpu, guidance_scale: 3}}
  denoiser:
    engine: diffusion
    model: {model}
    options:
      {{part: denoise, dtype: float32, device: cpu, guidance_scale: 3, height: 64, width: 64, max_side: 256,
        num_inference_steps: 4, max_batch: 1, preview_steps: {preview_steps}}}
  decoder:
    engine: diffusion
    model: {model}
    options: {{part: decode, dtype: float32, device: cpu}}
edges:
  - {{from: encoder, to: denoiser}}
  - {{from: denoiser, to: decoder}}
outputs: {{image: decoder, numbers: decoder.frames}}
"""


# -- three services


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_qwen_image(tmp_path_factory.mktemp("qwen-image"))


@pytest.fixture(scope="module")
def services(folder: Path) -> Generator[Deployment]:
    path = folder / "parts.yaml"
    path.write_text(PIPELINE.format(model=folder, preview_steps=PREVIEW_STEPS))
    with deployed(path) as up:
        yield up


@pytest.fixture(scope="module")
def client(services: Deployment) -> Generator[Client]:
    with services.client() as made:
        yield made


@pytest.fixture(scope="module")
def classic(folder: Path) -> Any:
    return load(folder)


def options_of(wish: Wish) -> dict[str, float]:
    return {
        "height": wish.height,
        "width": wish.width,
        "num_inference_steps": wish.steps,
        "guidance_scale": wish.scale,
    }


def pictures(client: Client, wish: Wish) -> list[Array]:
    """All that come, the last one last."""
    generation = client.generate(
        wish.prompt, negative_prompt=wish.negative_prompt, seed=wish.seed, options=options_of(wish)
    )
    return [event.tensor for event in generation if isinstance(event, TensorOutput)]


def digest_of(classic: Any, wish: Wish) -> str:
    return md5(picture("qwen-image", classic, wish).numpy())


@pytest.mark.parametrize(
    "wish", [WISH, replace(WISH, prompt="x", height=96, width=64, steps=2), replace(WISH, scale=1.0, steps=3)]
)
def test_three_services_make_what_one_call_makes(wish: Wish, client: Client, classic: Any) -> None:
    assert md5(pictures(client, wish)[-1]) == digest_of(classic, wish)


def test_previews_come_every_few_steps_and_the_last_is_final(client: Client) -> None:
    made = pictures(client, WISH)
    assert len(made) == 1 + (WISH.steps - 1) // PREVIEW_STEPS
    assert all(one.shape == (1, 3, WISH.height, WISH.width) for one in made)
    assert len({md5(one) for one in made}) == len(made)


def test_a_picture_comes_as_a_file_too(client: Client) -> None:
    result = client.generate(WISH.prompt, seed=1, options=options_of(WISH), outputs=["image"]).result()
    assert result.images["image"].media_type == "image/png"
    assert not result.tensors


def test_steps_are_told_by_the_stage_that_makes_them(client: Client) -> None:
    told = [event for event in client.generate("x", seed=1) if isinstance(event, Progress)]
    steps = [event.steps for event in told if event.stage == "denoiser"]
    assert (steps[-1], steps) == (4, sorted(steps))


def test_what_one_stage_refuses_leaves_nothing_in_any(client: Client, services: Deployment) -> None:
    with pytest.raises(StagemeshError, match="option height is 65; it must be a multiple of 16"):
        pictures(client, replace(WISH, height=65))
    eventually(services.idle, timeout_s=5)


# -- each part alone


@pytest.fixture(scope="module", params=WRITERS)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    model: str = request.param
    folder = WRITERS[model](tmp_path_factory.mktemp(model))
    names: tuple[Part, ...] = ("encode", "denoise", "decode")
    return model, folder, {part: ModularStepPipeline(folder, torch.float32, part=part) for part in names}


def test_parts_of_every_model_make_what_its_call_makes(parts: tuple[str, Path, dict[str, Any]]) -> None:
    model, folder, pipelines = parts
    carriers = {part: RequestTransfer(pipeline, folder) for part, pipeline in pipelines.items()}
    inputs = inputs_of(model, WISH)
    encoded = DiffusionRequestState("r", inputs)
    pipelines["encode"].prepare_encode(encoded)
    state = DiffusionRequestState("r", replace(inputs, prompt="", negative_prompt=""))
    carriers["denoise"].unpack_conditioning(state, carriers["encode"].pack_conditioning(encoded))
    pipelines["denoise"].prepare_encode(state)
    while not state.denoised:
        (noise,) = pipelines["denoise"].denoise_step([state])
        pipelines["denoise"].step_scheduler(state, noise)
    made = DiffusionRequestState("r", DiffusionInputs(seed=0))
    carriers["decode"].unpack_latents(made, carriers["denoise"].pack_latents(state))
    pipelines["decode"].prepare_encode(made)
    assert torch.equal(pipelines["decode"].post_decode(made), picture(model, load(folder), WISH))


def test_a_part_loads_its_own_folders_alone(parts: tuple[str, Path, dict[str, Any]]) -> None:
    _, _, pipelines = parts
    loaded = {
        part: [name for name in ("text_encoder", "transformer", "vae") if getattr(pipeline.components, name, None)]
        for part, pipeline in pipelines.items()
    }
    assert loaded == {"encode": ["text_encoder"], "denoise": ["transformer"], "decode": ["vae"]}


def test_what_is_for_another_part_is_refused(parts: tuple[str, Path, dict[str, Any]]) -> None:
    model, folder, pipelines = parts
    state = DiffusionRequestState("r", inputs_of(model, WISH))
    pipelines["encode"].prepare_encode(state)
    packed = RequestTransfer(pipelines["encode"], folder).pack_conditioning(state)
    with pytest.raises(InvalidChunkError, match="latents has the kind 'conditioning'"):
        RequestTransfer(pipelines["decode"], folder).unpack_latents(DiffusionRequestState("r", state.inputs), packed)


@pytest.mark.parametrize("part", ["denoise", "decode"])
async def test_a_part_that_is_fed_by_no_edge_says_so(part: str, folder: Path) -> None:
    engine = DiffusionEngine(diffusion_config("qwen-image", folder, part=part))
    await engine.start(lambda _: None)
    try:
        with pytest.raises(InvalidRequestError, match="this stage is fed by one edge, and 0 are bound"):
            await collect(engine.submit(Task("r", 0)))
    finally:
        await engine.close()
