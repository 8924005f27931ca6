"""The inputs and the state of a diffusion request."""

from dataclasses import dataclass, field
from typing import Any

from diffusers.modular_pipelines.modular_pipeline import PipelineState


@dataclass(frozen=True)
class DiffusionInputs:
    """The inputs of a diffusion request. A stage that runs only one part of a pipeline reads only some of the
    inputs.
    """

    seed: int
    prompt: str = ""
    negative_prompt: str = ""
    image: bytes | None = None
    """Content of the input image file, or None if the request has no image. Only models that edit images accept an
    input image."""
    height: int = 0
    """Height of the image in pixels. 0 if the request does not set the height."""
    width: int = 0
    num_inference_steps: int = 0
    guidance_scale: float = 1.0
    num_frames: int = 1
    """Number of frames of the video. 1 for an image."""
    adapter: str | None = None
    """Name of the LoRA adapter for denoising, or None if the request does not use an adapter."""
    adapter_scale: float = 1.0
    """Strength of the LoRA adapter. 1 is the strength with which the adapter was trained."""


@dataclass
class DiffusionRequestState:
    """The data of a diffusion request between the phases of the pipeline. Excludes the model.

    `transfer` serializes this data for another process.
    """

    request_id: str
    inputs: DiffusionInputs
    values: Any = field(default_factory=PipelineState)
    """diffusers' `PipelineState` with the results of completed blocks by name, such as embeddings, masks, sizes and
    timesteps."""
    loop: Any = None
    """diffusers' `BlockState` with the variables of the denoising loop. None before and after the loop."""
    scheduler: Any = None
    """The request's own diffusers scheduler. Contains the position in the noise schedule. None before denoising."""
    guider: Any = None
    """The request's own diffusers guider. Contains the guidance scale. None if the model has no guider."""
    step_index: int = 0
    """Number of completed denoising steps."""
    total_steps: int = 0
    """Total number of denoising steps. 0 until the noise schedule is set."""

    @property
    def denoised(self) -> bool:
        """Whether all denoising steps are completed. False before the noise schedule is set."""
        return self.total_steps > 0 and self.step_index >= self.total_steps
