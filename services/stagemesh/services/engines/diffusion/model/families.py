"""The kinds of models that can be stepped through, and where their modular forms differ from each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """One kind of model, as diffusers' modular form of it goes about its work."""

    blocks: str
    """The class of diffusers that lists its blocks."""
    output: str = "images"
    """What its last block leaves."""
    guidance_from_zero: bool = False
    """Whether a guidance scale of 0 is none, and not 1."""
    encodes_both: bool = False
    """Whether its text encoder's block fails where no guidance asks for the negative prompt."""
    joint_guidance: Literal["negative first", "negative last"] | None = None
    """Where the pipeline's own `__call__` denoises both branches of guidance in one forward, in which order."""
    masks: tuple[str, ...] = ()
    """Masks of prompts, which hide nothing where a prompt is alone."""
    shared_inputs: frozenset[str] = frozenset()
    """What its transformer takes once for all rows of a batch."""
    mixed_lengths: bool = False
    """Whether rows of different lengths can share a forward; see `mixed_rows`."""
    size_multiple: int = 16
    """Of height and width, in pixels: what the VAE shrinks by times the side of a patch."""
    frames_multiple: int = 0
    """Frames are one more than a multiple of it; 0 for models that make pictures."""
    min_steps: int = 1
    """With fewer its schedule divides by zero."""
    takes_image: bool = False
    """Whether it starts from a picture."""


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
"""By the class that `model_index.json` names."""
