"""What belongs to one diffusion request, and to nobody else."""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState


@dataclass(frozen=True)
class DiffusionInputs:
    """What a request asks for. A stage that is one part of a pipeline reads what its part needs."""

    seed: int
    prompt: str = ""
    negative_prompt: str = ""
    image: bytes | None = None
    """The picture to start from, as a file; for models that edit."""
    height: int = 0
    """Pixels."""
    width: int = 0
    num_inference_steps: int = 0
    guidance_scale: float = 1.0
    num_frames: int = 1
    """Of a film; for models that make pictures it is 1."""
    adapter: str | None = None
    """The LoRA adapter to denoise with."""
    adapter_scale: float = 1.0
    """How much of it."""


@dataclass
class DiffusionRequestState:
    """A request between its phases. It refers to no model; `packing` takes it to another process."""

    request_id: str
    inputs: DiffusionInputs
    values: Any = field(default_factory=PipelineState)
    """A `PipelineState`: what the blocks have made so far, by their names (embeddings, masks, sizes, timesteps)."""
    loop: Any = None
    """A `BlockState`: what the denoising loop reads and writes; None outside of it."""
    scheduler: Any = None
    """The request's own, with its place in the schedule."""
    guider: Any = None
    """The request's own, with its scale; None where the model has none."""
    step_index: int = 0
    """Steps done."""
    total_steps: int = 0
    """Steps in all; 0 until the request is encoded."""

    @property
    def latents(self) -> torch.Tensor:
        """As the model lays them out."""
        latents: torch.Tensor = self.values.get("latents") if self.loop is None else self.loop.latents
        return latents

    @property
    def denoised(self) -> bool:
        """Whether no step is left."""
        return self.total_steps > 0 and self.step_index >= self.total_steps
