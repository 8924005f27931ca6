"""The state of one diffusion request."""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState


@dataclass(frozen=True)
class DiffusionInputs:
    """Inputs of a request. A stage that runs one part of a pipeline reads only the inputs that its part needs."""

    seed: int
    prompt: str = ""
    negative_prompt: str = ""
    image: bytes | None = None
    """The content of the input image file, for models that edit images. None if the request has no image."""
    height: int = 0
    """Height in pixels. 0 means that the request does not set it."""
    width: int = 0
    num_inference_steps: int = 0
    guidance_scale: float = 1.0
    num_frames: int = 1
    """Number of video frames. 1 for image models."""
    adapter: str | None = None
    """Name of the LoRA adapter used for denoising. None means no adapter."""
    adapter_scale: float = 1.0
    """Strength of the adapter. 1 applies it as trained."""


@dataclass
class DiffusionRequestState:
    """The data of a request between its phases. Contains no model. `transfer` serializes it for another process."""

    request_id: str
    inputs: DiffusionInputs
    values: Any = field(default_factory=PipelineState)
    """A `PipelineState`: the results of completed blocks, such as embeddings, masks, sizes and timesteps, by name."""
    loop: Any = None
    """A `BlockState`: the variables of the denoising loop. None before and after the loop."""
    scheduler: Any = None
    """The request's own scheduler object of diffusers, with its position in the schedule. None before denoising."""
    guider: Any = None
    """The request's own guider, with its guidance scale. None if the model has no guider."""
    step_index: int = 0
    """Number of completed steps."""
    total_steps: int = 0
    """Total number of steps. 0 until the request is encoded."""

    @property
    def latents(self) -> torch.Tensor:
        """The current latents, in the model's layout."""
        latents: torch.Tensor = self.values.get("latents") if self.loop is None else self.loop.latents
        return latents

    @property
    def denoised(self) -> bool:
        """Whether all steps are completed."""
        return self.total_steps > 0 and self.step_index >= self.total_steps
