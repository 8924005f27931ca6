"""The inputs and the state of a diffusion request, and the error that a failed request reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from stagemesh.common.errors import InternalError, InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.common.process.logs import log_cause
from stagemesh.common.wire.tensors import Value
from stagemesh.services.engines.diffusion.model.suspended_call import SuspendedCall

BlockPath: TypeAlias = tuple[str, ...]
"""The names of the blocks of a pipeline that lead to one of its blocks, outermost first."""


@dataclass(frozen=True)
class Outputs:
    """The output of a pipeline for one request, by kind."""

    frames: torch.Tensor | None = None
    """Images [images, channels, height, width] or videos [videos, frames, channels, height, width], with values in
    [0, 1]."""
    audio: torch.Tensor | None = None
    """Audio with values in [-1, 1], [clips, channels, samples]."""
    sample_rate_hz: int = 0
    text: str | None = None
    """The part of a text that was not returned before."""


@dataclass(frozen=True)
class DiffusionInputs:
    """The inputs of a diffusion request. A stage that runs only one part of a pipeline reads only some of the
    inputs.
    """

    seed: int
    prompt: str = ""
    negative_prompt: str | None = None
    """None if the request has no negative prompt, which differs from an empty one for some models."""
    images: tuple[bytes, ...] = ()
    """Contents of the input image files. Only some models accept input images."""
    height: int = 0
    """Height of the image in pixels. 0 if the request does not set the height."""
    width: int = 0
    num_inference_steps: int = 0
    guidance_scale: float | None = 1.0
    """Scale of classifier-free guidance. None selects the model's own scales."""
    num_frames: int = 1
    """Number of frames of the video. 1 for an image."""
    adapter: str | None = None
    """The LoRA adapters for denoising in the form that `parse_adapters` reads, or None if the request uses none."""
    adapter_scale: float = 1.0
    """Factor of the scales of all LoRA adapters. 1 is the strength with which an adapter was trained."""
    arguments: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """Further arguments of a classic pipeline's call, by parameter name."""
    requested: frozenset[str] = frozenset()
    """The names of the options that the request sets."""


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
    guiders: dict[str, Any] = field(default_factory=dict[str, Any])
    """The request's own diffusers guiders by component name. They contain the guidance scale."""
    schedulers: dict[str, Any] = field(default_factory=dict[str, Any])
    """The request's own diffusers schedulers by component name. They contain the position in the noise schedule. Empty
    before denoising."""
    loop_path: BlockPath = ()
    """The path of the block that is the request's denoising loop. Empty before denoising."""
    loop: Any = None
    """diffusers' `BlockState` with the variables of the denoising loop. None before and after the loop, and if the loop
    runs as a suspended call."""
    steps: Sequence[Mapping[str, Any]] = ()
    """The arguments of each step of the loop, such as its index and its timestep."""
    call: SuspendedCall[Any, Any] | None = None
    """The call of a denoising loop whose variables cannot be read between steps. None for other loops."""
    step_index: int = 0
    """Number of completed denoising steps."""
    total_steps: int = 0
    """Total number of denoising steps. 0 until the noise schedule is set."""

    def close(self) -> None:
        """Ends the request's suspended call, if it has one. May be called more than once."""
        if self.call is not None:
            self.call.close()

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
