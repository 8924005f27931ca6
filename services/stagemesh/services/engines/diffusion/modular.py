"""Any model that diffusers has in modular form, cut into the four phases.

A modular pipeline is a list of blocks, of which one is the denoising loop, itself made of blocks for one step. Blocks
find the model's parts on the pipeline that they are given: each request has a shallow copy of it, with a scheduler and
a guider of its own.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

from stagemesh.connectors.errors import NotReadyError
from stagemesh.services.engines.diffusion.state import DiffusionRequestState

diffusers: Any = _diffusers

_DENOISER = "denoiser"
"""The block of a step that makes the noise; those after it go on by it."""


@dataclass(frozen=True)
class Family:
    """How diffusers' modular form of a kind of model is called, and how it counts guidance."""

    blocks: str
    from_zero: bool = False
    """Whether a guidance scale of 0 is none, and not 1."""


FAMILIES: Mapping[str, Family] = {
    "QwenImagePipeline": Family("QwenImageAutoBlocks"),
    "FluxPipeline": Family("FluxAutoBlocks"),
    "StableDiffusion3Pipeline": Family("StableDiffusion3AutoBlocks"),
    "WanPipeline": Family("WanBlocks"),
    "ZImagePipeline": Family("ZImageAutoBlocks", from_zero=True),
}
"""By the class that `model_index.json` names."""


class ModularStepPipeline:
    """See `stagemesh.services.engines.diffusion.base.StepPipeline`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Loads a pipeline that diffusers saved; raises NotReadyError for one that it cannot step through."""
        name: str = diffusers.DiffusionPipeline.load_config(folder, local_files_only=True)["_class_name"]
        if name not in FAMILIES:
            raise NotReadyError(
                f"{folder} holds a {name}; the diffusion engine knows {', '.join(FAMILIES)}", reason="UNSUPPORTED_MODEL"
            )
        self._family = FAMILIES[name]
        self._pipeline: Any = getattr(diffusers, self._family.blocks)().init_pipeline(str(folder))
        self._pipeline.load_components(dtype=dtype)
        blocks = list(self._pipeline.blocks.get_execution_blocks(prompt="").sub_blocks.values())
        (at,) = (i for i, block in enumerate(blocks) if isinstance(block, LoopSequentialPipelineBlocks))
        self._before, self._loop, self._after = blocks[:at], blocks[at], blocks[at + 1 :]
        steps = dict(self._loop.sub_blocks)
        cut = list(steps).index(_DENOISER) + 1
        self._denoise, self._advance = list(steps.values())[:cut], list(steps.values())[cut:]
        self._output: str = self._pipeline.blocks.outputs[0].name

    @torch.no_grad()
    def prepare_encode(self, state: DiffusionRequestState) -> None:
        """See `StepPipeline`."""
        # Before the blocks call `set_timesteps`: a schedule is one request's.
        state.scheduler = copy.deepcopy(self._pipeline.scheduler)
        state.guider = self._guider(state.inputs.guidance_scale)
        given = _given(state)
        for param in self._pipeline.blocks.inputs:
            if param.name is not None:
                state.values.set(param.name, given.get(param.name, param.default), param.kwargs_type)
        view = self._view(state)
        for block in self._before:
            block(view, state.values)
        state.loop = loop = self._loop.get_block_state(state.values)
        # Blocks of a step read these; the loop's own `__call__` would have set them.
        loop.num_warmup_steps, loop.additional_cond_kwargs = 0, {}
        state.total_steps = len(loop.timesteps)

    @torch.no_grad()
    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor]:
        """See `StepPipeline`. One after the other: a modular step is made for one request."""
        return [self._run(self._denoise, state)["noise_pred"] for state in batch]

    @torch.no_grad()
    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor) -> None:
        """See `StepPipeline`."""
        assert state.loop is not None, "a request is encoded before its steps"
        state.loop.noise_pred = noise_pred
        self._run(self._advance, state)
        state.step_index += 1

    @torch.no_grad()
    def post_decode(self, state: DiffusionRequestState) -> torch.Tensor:
        """See `StepPipeline`."""
        self._loop.set_block_state(state.values, state.loop)
        state.loop = None
        view = self._view(state)
        for block in self._after:
            block(view, state.values)
        made: torch.Tensor = state.values.get(self._output)
        return made

    # -- inner workings

    def _run(self, blocks: Sequence[Any], state: DiffusionRequestState) -> Any:
        assert state.loop is not None, "a request is encoded before its steps"
        view, i = self._view(state), state.step_index
        for block in blocks:
            _, state.loop = block(view, state.loop, i=i, t=state.loop.timesteps[i])
        return state.loop

    def _guider(self, scale: float) -> Any:
        """The model's own with a scale; None where the scale is an input of the model."""
        guider = copy.deepcopy(getattr(self._pipeline, "guider", None))
        if guider is not None:
            guider.guidance_scale = scale
            guider.use_original_formulation = self._family.from_zero
            guider.enable()
        return guider

    def _view(self, state: DiffusionRequestState) -> Any:
        """The pipeline as this request's blocks see it."""
        view = copy.copy(self._pipeline)
        view.scheduler = state.scheduler
        if state.guider is not None:
            view.guider = state.guider
        return view


def _given(state: DiffusionRequestState) -> dict[str, object]:
    inputs = state.inputs
    return {
        "prompt": inputs.prompt,
        "negative_prompt": inputs.negative_prompt,
        "height": inputs.height,
        "width": inputs.width,
        "num_frames": inputs.num_frames,
        "num_inference_steps": inputs.num_inference_steps,
        "guidance_scale": inputs.guidance_scale,
        "generator": torch.Generator().manual_seed(inputs.seed),
        "output_type": "pt",
    }
