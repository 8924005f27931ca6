"""The supported model families, and the differences between their modular pipelines in diffusers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Properties of one model family in diffusers' modular form."""

    blocks: str
    """Name of the diffusers class that defines the blocks."""
    output: str = "images"
    """Name of the value that contains the result of the last block."""
    guidance_from_zero: bool = False
    """Whether a guidance scale of 0 disables guidance. In other families, a scale of 1 disables it."""
    encodes_both: bool = False
    """Whether the text encoder's block must always encode both prompts, because it fails without a negative prompt."""
    joint_guidance: Literal["negative first", "negative last"] | None = None
    """Order of the guidance branches in a joint forward pass.

    None if the pipeline's own `__call__` denoises each branch in a separate forward pass.
    """
    masks: tuple[str, ...] = ()
    """Names of the prompt masks. A mask excludes tokens only if prompts of different lengths are batched."""
    shared_inputs: frozenset[str] = frozenset()
    """Names of the transformer inputs that all rows of a batch share."""
    mixed_lengths: bool = False
    """Whether rows of different lengths can share a forward pass (`batching.mixed_lengths`)."""
    size_multiple: int = 16
    """Height and width must be multiples of this number: the VAE's downscaling factor times the patch size."""
    frames_multiple: int = 0
    """The number of frames must be one more than a multiple of this number. 0 for image models."""
    min_steps: int = 1
    """Minimum number of steps. With fewer steps, the schedule would divide by zero."""
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
"""The supported families by the name of the pipeline class in `model_index.json`."""
