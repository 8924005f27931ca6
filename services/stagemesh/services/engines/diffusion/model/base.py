"""The contract between whoever schedules steps and a model's pipeline."""

from collections.abc import Sequence
from typing import Protocol

import torch

from stagemesh.services.engines.diffusion.state import DiffusionRequestState


class StepPipeline(Protocol):
    """A pipeline in four phases. All of a request is in its state, so that requests may take turns at any step.

    `prepare_encode` once, then `denoise_step` and `step_scheduler` for each step, then `post_decode` once: together
    they compute what the pipeline's own `__call__` does. Used by one thread.
    """

    def prepare_encode(self, state: DiffusionRequestState) -> None:
        """Encodes the prompt, makes the noise and the schedule."""

    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor]:
        """The noise that the model sees in each, at the step where it is."""
        ...

    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor) -> None:
        """Goes on by one step."""

    def post_decode(self, state: DiffusionRequestState) -> torch.Tensor:
        """What was asked for, in [0, 1]: [pictures, channels, height, width], or [films, frames, channels, …]."""
        ...
