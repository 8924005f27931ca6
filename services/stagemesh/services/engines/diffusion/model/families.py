"""The properties of a model that diffusers does not declare, and the index file of a model's folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from stagemesh.common.errors import NotReadyError

MODULAR_INDEX, CLASSIC_INDEX = "modular_model_index.json", "model_index.json"


@dataclass(frozen=True)
class Family:
    """The limits of a loaded model that a request must respect."""

    size_multiple: int = 16
    """Required divisor of an image's height and width in pixels: the VAE's downscaling factor times the patch size."""
    frames_multiple: int = 0
    """Required divisor of the number of frames minus 1. 0 for models that generate images."""
    min_steps: int = 1
    """Minimum number of denoising steps."""
    min_images: int = 0
    """Minimum number of input images."""
    max_images: int = 0
    """Maximum number of input images."""


@dataclass(frozen=True)
class Hints:
    """Properties of a model's blocks in diffusers that make requests faster or reproduce the classic pipeline.

    All are optional. Without hints, each forward pass computes one request as the blocks define it.
    """

    batches: bool = False
    """Whether requests can share forward passes. Their transformer calls must be repeatable: a call's inputs do not
    depend on the results of other calls of the same step."""
    mixed_lengths: bool = False
    """Whether requests with different prompt lengths or image sizes can share a forward pass (see
    `model.mixed_lengths`)."""
    joint_guidance: Literal["negative first", "negative last"] | None = None
    """Order of the positive and negative guidance branches in a forward pass that computes both branches.

    None if the diffusers pipeline computes each branch in a separate forward pass."""
    shared_inputs: frozenset[str] = frozenset()
    """Names of the transformer inputs that have no row axis, because all rows of a batch share the same value."""
    masks: tuple[str, ...] = ()
    """Names of the pipeline values that contain the prompts' attention masks. A mask that excludes no tokens is
    removed, because attention without a mask is faster."""
    guidance_from_zero: bool = False
    """Whether a guidance scale of 0 disables guidance. If False, a scale of 1 disables guidance."""
    encodes_both: bool = False
    """Whether the text encoder must always encode a negative prompt, even without guidance. Without a negative prompt,
    the encoder of such a model fails."""
    several_images: bool = False
    """Whether a list of images is the input of one request, such as references. If False, each image of a list would be
    the input of another prompt."""
    runs_whole: bool = False
    """Whether the loop's own code does more in an iteration than to run the blocks of the step."""
    min_steps: int = 1
    """Minimum number of denoising steps. With fewer steps, the computation of the noise schedule would divide by
    zero."""


_MASKS = ("prompt_embeds_mask", "negative_prompt_embeds_mask")
_QWEN = Hints(batches=True, mixed_lengths=True, masks=_MASKS, min_steps=2)
HINTS: Mapping[str, Hints] = {
    "qwenimage": _QWEN,
    "qwenimage-edit": _QWEN,
    "qwenimage-edit-plus": Hints(several_images=True, min_steps=2),
    "qwenimage-layered": Hints(min_steps=2),
    "flux2": Hints(several_images=True),
    "flux2-klein": Hints(several_images=True),
    "cosmos3-omni": Hints(runs_whole=True),
    "flux": Hints(batches=True, shared_inputs=frozenset({"img_ids", "txt_ids"})),
    "stable-diffusion-3": Hints(batches=True, joint_guidance="negative first"),
    "wan": Hints(batches=True, encodes_both=True),
    "z-image": Hints(batches=True, guidance_from_zero=True, joint_guidance="negative last"),
}
"""The hints by the model's name in diffusers' `MODULAR_PIPELINE_MAPPING`."""


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the content of the index file of the pipeline in `folder`, which names the pipeline's class.

    Raises NotReadyError if the folder has no valid index, or if the index needs code of the folder.
    """
    index = next((folder / name for name in (MODULAR_INDEX, CLASSIC_INDEX) if (folder / name).exists()), None)
    path = index or folder / CLASSIC_INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name = content["_class_name"]
    except (OSError, KeyError, TypeError, ValueError) as exc:
        problem = f"cannot be read: {exc.strerror}" if isinstance(exc, OSError) else f"names no pipeline class: {exc!r}"
        raise NotReadyError(f"{path} {problem}; name a diffusers pipeline's folder", reason="LOAD_FAILED") from exc
    if not isinstance(name, str):
        raise NotReadyError(
            f"{path} names the class {name!r}, which is code of the folder; a stage runs only classes of diffusers",
            reason="UNSUPPORTED_MODEL",
        )
    return dict(content)


def model_problem(folder: Path, _options: Mapping[str, JsonValue]) -> str:
    """Returns why the engine cannot run the model in a folder, or "" if diffusers has the class that the index names.

    Does not load diffusers, which takes seconds. A stage that loads the model checks the index completely.
    """
    try:
        name = read_index(folder)["_class_name"]
    except NotReadyError as exc:
        return exc.message
    package = find_spec("diffusers")
    # The package's own module lists the names of all its classes.
    if package is None or package.origin is None or f'"{name}"' in Path(package.origin).read_text(encoding="utf-8"):
        return ""
    return f"the installed diffusers has no class {name}, which {folder} names; install a newer version"
