"""A pipeline in three services, each with its own folders, generates the same images as `__call__`."""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.client import Client, Progress, TensorOutput
from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, StagemeshError
from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion import CONDITIONING, LATENTS
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions, Part
from stagemesh.services.engines.diffusion.request_transfer import RequestTransfer
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from tests.deployment import Deployment, deployed, eventually
from tests.diffusion.pipeline_runs import frames_of, inputs_of
from tests.diffusion.stages import diffusion_config, image_options, md5, started
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import WRITERS
from tests.engines.support import collect

pytestmark = pytest.mark.timeout(240)

SPEC = ImageSpec(prompt="two dogs and a long tail", seed=7, height=64, width=96, steps=5, scale=3.0)
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
def services(qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Deployment]:
    path = tmp_path_factory.mktemp("parts") / "parts.yaml"
    path.write_text(PIPELINE.format(model=qwen_image, preview_steps=PREVIEW_STEPS))
    with deployed(path) as up:
        yield up


@pytest.fixture(scope="module")
def client(services: Deployment) -> Generator[Client]:
    with services.client() as made:
        yield made


@pytest.fixture(scope="module")
def classic(qwen_image: Path) -> Any:
    return load(qwen_image)


def images(client: Client, spec: ImageSpec) -> list[Array]:
    """Returns the previews and the final image."""
    generation = client.generate(
        spec.prompt, negative_prompt=spec.negative_prompt, seed=spec.seed, options=image_options(spec)
    )
    return [event.tensor for event in generation if isinstance(event, TensorOutput)]


def digest_of(classic: Any, spec: ImageSpec) -> str:
    return md5(classic_image("qwen-image", classic, spec).numpy())


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, prompt="x", height=96, width=64, steps=2), replace(SPEC, scale=1.0, steps=3)]
)
def test_three_services_generate_the_same_image_as_one_call(spec: ImageSpec, client: Client, classic: Any) -> None:
    assert md5(images(client, spec)[-1]) == digest_of(classic, spec)


def test_previews_arrive_at_their_interval(client: Client) -> None:
    made = images(client, SPEC)
    assert len(made) == 1 + (SPEC.steps - 1) // PREVIEW_STEPS
    assert all(one.shape == (1, 3, SPEC.height, SPEC.width) for one in made)
    assert len({md5(one) for one in made}) == len(made)


def test_an_image_arrives_as_a_file(client: Client) -> None:
    result = client.generate(SPEC.prompt, seed=1, options=image_options(SPEC), outputs=["image"]).result()
    assert result.images["image"][0].media_type == "image/png"
    assert not result.tensors


def test_the_denoiser_reports_its_steps(client: Client) -> None:
    progress = [event for event in client.generate("x", seed=1) if isinstance(event, Progress)]
    steps = [event.engine_steps for event in progress if event.stage == "denoiser"]
    assert (steps[-1], steps) == (4, sorted(steps))


def test_a_request_that_one_stage_rejects_leaves_no_stage_busy(client: Client, services: Deployment) -> None:
    with pytest.raises(StagemeshError, match="option 'height' is 8; it must be a multiple of 16"):
        images(client, replace(SPEC, height=8))
    eventually(services.idle, timeout_s=5)


# -- each part alone


@pytest.fixture(scope="module", params=WRITERS)
def parts(request: pytest.FixtureRequest, tiny_diffusion: Callable[[str], Path]) -> tuple[str, Path, dict[str, Any]]:
    model: str = request.param
    folder = tiny_diffusion(model)
    names: tuple[Part, ...] = ("encode", "denoise", "decode")
    options = {part: DiffusionOptions(dtype="float32", part=part) for part in names}
    return model, folder, {part: ModularStepPipeline(folder, each) for part, each in options.items()}


def test_parts_of_every_model_generate_the_same_image_as_its_call(parts: tuple[str, Path, dict[str, Any]]) -> None:
    model, folder, pipelines = parts
    carriers = {part: RequestTransfer(pipeline, folder) for part, pipeline in pipelines.items()}
    inputs = inputs_of(model, SPEC)
    encoded = DiffusionRequestState("r", inputs)
    pipelines["encode"].prepare_encode(encoded)
    state = DiffusionRequestState("r", replace(inputs, prompt="", negative_prompt=""))
    carriers["denoise"].restore_values(state, CONDITIONING, carriers["encode"].serialize(encoded, CONDITIONING))
    pipelines["denoise"].prepare_encode(state)
    while not state.denoised:
        (noise,) = pipelines["denoise"].denoise_step([state])
        pipelines["denoise"].step_scheduler(state, noise)
    made = DiffusionRequestState("r", DiffusionInputs(seed=0))
    carriers["decode"].restore_values(made, LATENTS, carriers["denoise"].serialize(state, LATENTS))
    pipelines["decode"].prepare_encode(made)
    assert torch.equal(frames_of(pipelines["decode"].post_decode(made)), classic_image(model, load(folder), SPEC))


def test_a_part_loads_only_its_own_folders(parts: tuple[str, Path, dict[str, Any]]) -> None:
    _, _, pipelines = parts
    loaded = {
        part: [name for name in ("text_encoder", "transformer", "vae") if getattr(pipeline.components, name, None)]
        for part, pipeline in pipelines.items()
    }
    assert loaded == {"encode": ["text_encoder"], "denoise": ["transformer"], "decode": ["vae"]}


def test_data_for_another_part_is_rejected(parts: tuple[str, Path, dict[str, Any]]) -> None:
    model, folder, pipelines = parts
    state = DiffusionRequestState("r", inputs_of(model, SPEC))
    pipelines["encode"].prepare_encode(state)
    packed = RequestTransfer(pipelines["encode"], folder).serialize(state, CONDITIONING)
    there, decoded = RequestTransfer(pipelines["decode"], folder), DiffusionRequestState("r", state.inputs)
    with pytest.raises(InvalidChunkError, match="latents has the kind 'conditioning'"):
        there.restore_values(decoded, LATENTS, packed)


@pytest.mark.parametrize("part", ["denoise", "decode"])
async def test_a_part_without_an_incoming_edge_is_an_error(part: str, qwen_image: Path) -> None:
    async with started(diffusion_config("qwen-image", qwen_image, part=part)) as engine:
        with pytest.raises(InvalidRequestError, match=r"this stage needs (one|an) incoming edge"):
            await collect(engine.submit(Task("r", 0)))
