"""Runs requests on a pipeline or a runner, without an engine."""

from collections.abc import Sequence

import torch

from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState, Outputs
from stagemesh.services.engines.diffusion.worker import DiffusionRunner
from tests.diffusion.tiny.calls import WAN_FRAMES, ImageSpec


def inputs_of(model: str, spec: ImageSpec) -> DiffusionInputs:
    """Returns the engine's inputs for an image."""
    return DiffusionInputs(
        prompt=spec.prompt,
        seed=spec.seed,
        height=spec.height,
        width=spec.width,
        num_inference_steps=spec.steps,
        guidance_scale=spec.scale,
        negative_prompt=spec.negative_prompt,
        num_frames=WAN_FRAMES if model.startswith("wan") else 1,
    )


def run_alone(model: str, pipeline: ModularStepPipeline, spec: ImageSpec) -> torch.Tensor:
    """Runs one request and returns its image."""
    (image,) = run_together(model, pipeline, [spec])
    return image


def run_together(model: str, pipeline: ModularStepPipeline, specs: Sequence[ImageSpec]) -> list[torch.Tensor]:
    """Runs requests that share each step until they are done. Returns their images."""
    states = [DiffusionRequestState(str(i), inputs_of(model, spec)) for i, spec in enumerate(specs)]
    for state in states:
        pipeline.prepare_encode(state)
    while running := [state for state in states if not state.denoised]:
        for state, noise in zip(running, pipeline.denoise_step(running), strict=True):
            pipeline.step_scheduler(state, noise)
    return [frames_of(pipeline.post_decode(state)) for state in states]


def frames_of(outputs: Outputs) -> torch.Tensor:
    assert outputs.frames is not None
    return outputs.frames


def run_to_end(runner: DiffusionRunner, inputs: DiffusionInputs) -> Array:
    """Runs one request on a runner and returns its frames."""
    for _ in range(runner.begin("", inputs).total_steps):
        assert runner.step([""]) == [None]
    frames = runner.decode("").frames
    assert frames is not None
    runner.drop("")
    return frames
