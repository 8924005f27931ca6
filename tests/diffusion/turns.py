"""Requests of a pipeline that take their steps together or by turns, without an engine."""

from collections.abc import Sequence

import torch

from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from tests.diffusion.tiny_calls import WAN_FRAMES, Wish


def inputs_of(model: str, wish: Wish) -> DiffusionInputs:
    """A wish as an engine takes it."""
    return DiffusionInputs(
        prompt=wish.prompt,
        seed=wish.seed,
        height=wish.height,
        width=wish.width,
        num_inference_steps=wish.steps,
        guidance_scale=wish.scale,
        negative_prompt=wish.negative_prompt,
        num_frames=WAN_FRAMES if model == "wan" else 1,
    )


def alone(model: str, pipeline: ModularStepPipeline, wish: Wish) -> torch.Tensor:
    """What a request makes that has the model for itself."""
    (made,) = together(model, pipeline, [wish])
    return made


def together(model: str, pipeline: ModularStepPipeline, wishes: Sequence[Wish]) -> list[torch.Tensor]:
    """What requests make that share each of their steps, as long as they have steps left."""
    states = [DiffusionRequestState(str(i), inputs_of(model, wish)) for i, wish in enumerate(wishes)]
    for state in states:
        pipeline.prepare_encode(state)
    while running := [state for state in states if not state.denoised]:
        for state, noise in zip(running, pipeline.denoise_step(running), strict=True):
            pipeline.step_scheduler(state, noise)
    return [pipeline.post_decode(state) for state in states]
