"""The supported model families, and how their modular pipelines in diffusers differ."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from stagemesh.common.errors import NotReadyError


@dataclass(frozen=True)
class Family:
    """Properties of one model family, as implemented by a modular pipeline of diffusers."""

    blocks: str
    """Name of the diffusers class that defines the pipeline's blocks."""
    output: str = "images"
    """Name of the pipeline value that contains the final images or videos."""
    guidance_from_zero: bool = False
    """Whether a guidance scale of 0 disables guidance. If False, a scale of 1 disables guidance."""
    encodes_both: bool = False
    """Whether the text encoder must always encode a negative prompt, even without guidance. Without a negative prompt,
    the encoder of such a family fails."""
    joint_guidance: Literal["negative first", "negative last"] | None = None
    """Order of the positive and negative guidance branches in a forward pass that computes both branches.

    None if the diffusers pipeline computes each branch in a separate forward pass."""
    masks: tuple[str, ...] = ()
    """Names of the pipeline values that contain the prompts' attention masks. A mask that excludes no tokens is
    removed, because attention without a mask is faster."""
    shared_inputs: frozenset[str] = frozenset()
    """Names of the transformer inputs that have no row axis, because all rows of a batch share the same value."""
    mixed_lengths: bool = False
    """Whether requests with different prompt lengths or image sizes can share a forward pass (see
    `model.mixed_lengths`)."""
    size_multiple: int = 16
    """Required divisor of an image's height and width in pixels: the VAE's downscaling factor times the patch size."""
    frames_multiple: int = 0
    """Required divisor of the number of frames minus 1. 0 for models that generate images."""
    min_steps: int = 1
    """Minimum number of denoising steps. With fewer steps, the computation of the noise schedule would divide by
    zero."""
    takes_image: bool = False
    """Whether each request must contain an input image."""


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
"""The supported model families, by the name of the pipeline class in `model_index.json`."""


def family_of(folder: Path) -> Family:
    """Returns the family of the model in `folder`.

    Raises NotReadyError if the folder does not contain a pipeline that the engine supports.
    """
    index = folder / "model_index.json"
    try:
        name = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (OSError, KeyError, TypeError, ValueError) as exc:
        problem = f"cannot be read: {exc.strerror}" if isinstance(exc, OSError) else f"names no pipeline class: {exc!r}"
        raise NotReadyError(f"{index} {problem}; name a diffusers pipeline's folder", reason="LOAD_FAILED") from exc
    if name not in FAMILIES:
        raise NotReadyError(
            f"the diffusion engine does not support {name} ({index}); it supports {', '.join(FAMILIES)}",
            reason="UNSUPPORTED_MODEL",
        )
    return FAMILIES[name]


def model_problem(folder: Path, _options: Mapping[str, JsonValue]) -> str:
    """Returns why the engine cannot run the model in a folder, or "" if it supports the model's family."""
    try:
        family_of(folder)
    except NotReadyError as exc:
        return exc.message
    return ""
