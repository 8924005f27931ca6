"""The inputs and the state of a diffusion request, and the error that a failed request reports."""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from stagemesh.common.errors import InternalError, InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.common.process.logs import log_cause


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

    `request_transfer` serializes this data for another process.
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


def to_stagemesh_error(exc: Exception) -> StagemeshError:
    """Returns the StagemeshError that is reported to the caller for an exception of a model or scheduler.

    A ValueError becomes an InvalidRequestError, because models raise ValueError for inputs that they do not support.
    """
    if isinstance(exc, StagemeshError):
        return exc
    # torch reports that host memory is exhausted only in the text of a RuntimeError.
    if isinstance(exc, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(exc):
        return OverloadedError(
            "the device does not have enough memory for the request in addition to the running requests; "
            f"{log_cause(exc, what='a request')}; request less, or lower the stage's max_running",
            reason="OUT_OF_MEMORY",
        )
    if isinstance(exc, ValueError):
        return InvalidRequestError(f"the model rejects the request: {exc}")
    cause = log_cause(exc, what="the model")
    return InternalError(f"the model failed with a {type(exc).__name__}; {cause}", reason="ENGINE_ERROR")
