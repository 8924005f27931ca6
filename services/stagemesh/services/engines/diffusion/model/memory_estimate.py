"""Estimates the memory that a request needs, from the properties of the loaded model. Used to admit requests."""

from dataclasses import dataclass
from typing import Any

import torch

from stagemesh.common.process.host import available_bytes
from stagemesh.services.engines.diffusion.admission import Footprint
from stagemesh.services.engines.diffusion.model.classic_pipeline import ClassicStepPipeline
from stagemesh.services.engines.diffusion.model.families import Family
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionInputs

_BLOCK_WIDTHS = 24
"""Number of tensor elements that a transformer block needs for each token, as a multiple of the model's width. Covers
queries, keys, values, MLP and residuals."""
_VAE_WIDTHS = 4
"""Number of tensor elements that the VAE needs for each pixel, as a multiple of the VAE's width."""
_TEXT_TOKENS = 512


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a loaded model, including estimates of the memory that a request needs per token and per pixel."""

    family: Family
    denoise_bytes: int
    """Estimated memory for denoising a request, in bytes per token. 0 if the stage does not load the transformer."""
    decode_bytes: int
    """Estimated memory for decoding a request, in bytes per pixel. 0 if the stage does not load the VAE."""
    resumable: bool
    """Whether requests can be paused, checkpointed and previewed between steps."""
    free_bytes: int
    """Device memory that was free for requests after the model had been loaded, in bytes."""

    def footprint(self, inputs: DiffusionInputs) -> Footprint:
        """Returns the estimated memory that a request with these inputs needs."""
        tokens = image_tokens(inputs, self.family) + _TEXT_TOKENS
        pixels = inputs.num_frames * inputs.height * inputs.width
        return Footprint(tokens * self.denoise_bytes, pixels * self.decode_bytes)


def model_facts(pipeline: ModularStepPipeline | ClassicStepPipeline) -> ModelFacts:
    """Returns the properties of the model that `pipeline` has loaded, with the device memory that is free now."""
    # The memory that a classic pipeline needs is unknown.
    denoise_bytes, decode_bytes = 0, 0
    if isinstance(pipeline, ModularStepPipeline):
        denoise_bytes, decode_bytes = _denoise_bytes(pipeline), _decode_bytes(pipeline)
    return ModelFacts(pipeline.family, denoise_bytes, decode_bytes, pipeline.resumable, _free_bytes(pipeline.device))


def image_tokens(inputs: DiffusionInputs, family: Family) -> int:
    """Returns the number of transformer tokens that represent the requested image or video. Excludes the prompt's
    tokens.
    """
    frames = 1 + (inputs.num_frames - 1) // (family.frames_multiple or 1)
    return frames * (inputs.height // family.size_multiple) * (inputs.width // family.size_multiple)


def _free_bytes(device: torch.device) -> int:
    """Returns the number of free bytes on a GPU.

    For the CPU, returns the number of bytes that this process can still allocate, or 0 if the number is unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return available_bytes() or 0


def _denoise_bytes(pipeline: ModularStepPipeline) -> int:
    model = pipeline.forwards.model
    if model is None:
        return 0
    config = model.config
    heads = (config.get("num_attention_heads"), config.get("attention_head_dim"))
    is_product = all(isinstance(each, int) for each in heads)
    width = int(config.get("dim") or (heads[0] * heads[1] if is_product else next(model.parameters()).shape[0]))
    return width * _BLOCK_WIDTHS * _item_bytes(model)


def _decode_bytes(pipeline: ModularStepPipeline) -> int:
    vae: Any = getattr(pipeline.components, "vae", None)
    if vae is None:
        return 0
    config = vae.config
    widths = config.get("block_out_channels") or [config.get("base_dim") or next(vae.parameters()).shape[0]]
    width = int(widths[0])
    return width * _VAE_WIDTHS * _item_bytes(vae)


def _item_bytes(model: Any) -> int:
    return int(torch.finfo(model.dtype).bits // 8)
