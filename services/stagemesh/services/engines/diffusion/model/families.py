"""The supported model families, and the differences between their modular pipelines in diffusers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Properties of one kind of model in diffusers' modular form."""

    blocks: str
    """Name of the diffusers class that lists the blocks."""
    output: str = "images"
    """Name of the value that the last block sets."""
    guidance_from_zero: bool = False
    """Whether a guidance scale of 0 means no guidance. For other families 1 does."""
    encodes_both: bool = False
    """Whether the text encoder's block fails if guidance does not need the negative prompt."""
    joint_guidance: Literal["negative first", "negative last"] | None = None
    """Order of the guidance branches if the pipeline's own `__call__` denoises both in one forward pass, else None."""
    masks: tuple[str, ...] = ()
    """Names of the prompt masks. They mask no token unless prompts of different lengths are batched."""
    shared_inputs: frozenset[str] = frozenset()
    """Inputs of the transformer that all rows of a batch share."""
    mixed_lengths: bool = False
    """Whether rows of different lengths can share a forward pass (`batching.mixed_lengths`)."""
    size_multiple: int = 16
    """Height and width are multiples of this number of pixels: the VAE's downscaling factor times the patch size."""
    frames_multiple: int = 0
    """The number of frames is one more than a multiple of this number; 0 for image models."""
    min_steps: int = 1
    """Minimum number of steps. With fewer, the schedule divides by zero."""
    takes_image: bool = False
    """Whether a request needs an input image."""


_MASKS = ("prompt_embeds_mask", "negative_prompt_embeds_mask")
FAMILIES: Mapping[str, Family] = {
    "QwenImagePipeline": Family("QwenImageAutoBlocks", mixed_lengths=True, masks=_MASKS, min_steps=2),
    "QwenImageEditPipeline": Family(
        "QwenImageEditAutoBlocks", mixed_lengths=True, masks=_MASKS, min_steps=2, takes_image=True
    ),
    "FluxPipeline": Family("FluxAutoBlocks", shared_inputs=frozenset({"img_ids", "txt_ids"})),
    "StableDiffusion3Pipeline": Family("StableDiffusion3AutoBlocks", joint_guidance="negative first"),
    "WanPipeline": Family("WanBlocks", output="videos", frames_multiple=4, encodes_both=True),
    "ZImagePipeline": Family("ZImageAutoBlocks", guidance_from_zero=True, joint_guidance="negative last"),
}
"""The supported families by the pipeline class in `model_index.json`."""
