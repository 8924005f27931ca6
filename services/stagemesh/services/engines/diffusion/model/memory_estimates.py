"""What requests take of a device's memory, from what a model is made of. Estimates, made to be too large."""

from dataclasses import dataclass
from typing import Any

import torch

from stagemesh.common.memory import available_bytes
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.scheduling.admission import Footprint
from stagemesh.services.engines.diffusion.state import DiffusionInputs

_BLOCK_WIDTHS = 24
"""Times the model's width that a block holds for a token: queries, keys, values, the MLP's, residuals."""
_VAE_WIDTHS = 4
"""Times the VAE's width that it holds for a pixel."""
_TEXT_TOKENS = 512


@dataclass(frozen=True)
class ModelSizes:
    """What a model takes for each token and pixel; 0 where a stage has not that part of it."""

    size_multiple: int
    """Of height and width, in pixels."""
    denoise_bytes: int
    """For a token."""
    decode_bytes: int
    """For a pixel."""

    def footprint(self, inputs: DiffusionInputs) -> Footprint:
        """Of a request for pictures or films of its size."""
        tokens = image_tokens(inputs, size_multiple=self.size_multiple) + _TEXT_TOKENS
        pixels = inputs.num_frames * inputs.height * inputs.width
        return Footprint(tokens * self.denoise_bytes, pixels * self.decode_bytes)


def sizes_of(pipeline: ModularStepPipeline) -> ModelSizes:
    """Those of a model that is loaded."""
    return ModelSizes(pipeline.family.size_multiple, _denoise_bytes(pipeline), _decode_bytes(pipeline))


def image_tokens(inputs: DiffusionInputs, *, size_multiple: int) -> int:
    """What a picture or film is to a transformer."""
    frames = 1 + (inputs.num_frames - 1) // 4
    return frames * (inputs.height // size_multiple) * (inputs.width // size_multiple)


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of a device; of the CPU, what this process can still allocate, or 0 if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return available_bytes() or 0


def _denoise_bytes(pipeline: ModularStepPipeline) -> int:
    model = getattr(pipeline.components, "transformer", None)
    if model is None:
        return 0
    config = model.config
    width = int(getattr(config, "dim", 0) or config.num_attention_heads * config.attention_head_dim)
    return width * _BLOCK_WIDTHS * _item_bytes(model)


def _decode_bytes(pipeline: ModularStepPipeline) -> int:
    vae: Any = getattr(pipeline.components, "vae", None)
    if vae is None:
        return 0
    config = vae.config
    width = int(config.base_dim if "base_dim" in config else config.block_out_channels[0])
    return width * _VAE_WIDTHS * _item_bytes(vae)


def _item_bytes(model: Any) -> int:
    return int(torch.finfo(model.dtype).bits // 8)
