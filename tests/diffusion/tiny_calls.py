"""How one wish is put to a tiny pipeline: to its `__call__`, and to its modular form."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch

diffusers: Any = _diffusers

BLOCKS = {
    "qwen-image": "QwenImageAutoBlocks",
    "flux": "FluxAutoBlocks",
    "sd3": "StableDiffusion3AutoBlocks",
    "wan": "WanBlocks",
    "z-image": "ZImageAutoBlocks",
}
WAN_FRAMES = 9
TOLERANCES = {"qwen-image": 0.0, "flux": 0.0, "sd3": 5e-6, "wan": 0.0, "z-image": 5e-6}
"""Of float32 pictures of the modular form: where it is not 0, `__call__` denoises both branches of guidance in one
forward, and the modular form in two."""


@dataclass(frozen=True)
class Wish:
    """A picture that somebody asks for."""

    prompt: str = "a red cube"
    negative_prompt: str = "blur"
    seed: int = 0
    height: int = 64
    width: int = 64
    steps: int = 4
    scale: float = 3.0


def picture(model: str, pipeline: Any, wish: Wish) -> torch.Tensor:
    """What the pipeline's own `__call__` makes."""
    guidance = {"true_cfg_scale": wish.scale} if model == "qwen-image" else {"guidance_scale": wish.scale}
    output = pipeline(**_common(model, wish), **guidance)
    made: torch.Tensor = output[0]
    return made


def modular_inputs(model: str, wish: Wish) -> dict[str, Any]:
    """The inputs of the blocks; all but Flux's take the scale from the guider."""
    guidance = {"guidance_scale": wish.scale} if model == "flux" else {}
    return {**_common(model, wish), **guidance}


def modular_picture(model: str, pipeline: Any, wish: Wish) -> torch.Tensor:
    """What the modular form makes of the same."""
    if model != "flux":
        pipeline.update_components(guider=guider(model, wish))
    made: torch.Tensor = pipeline(**modular_inputs(model, wish), output="videos" if model == "wan" else "images")
    return made


def guider(model: str, wish: Wish) -> Any:
    """Z-Image counts the scale from 0, the others from 1."""
    return diffusers.ClassifierFreeGuidance(guidance_scale=wish.scale, use_original_formulation=model == "z-image")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline as its authors use it."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_modular(model: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Its modular form. `ModularPipeline.from_pretrained` would find the blocks, and import every pipeline there is."""
    pipeline = getattr(diffusers, BLOCKS[model])().init_pipeline(str(folder))
    pipeline.load_components(dtype=dtype)
    for block in pipeline.blocks.get_execution_blocks(prompt="").sub_blocks.values():
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    return pipeline


def _common(model: str, wish: Wish) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "prompt": wish.prompt,
        "num_inference_steps": wish.steps,
        "height": wish.height,
        "width": wish.width,
        "generator": torch.Generator().manual_seed(wish.seed),
        "output_type": "pt",
    }
    if model != "flux":
        inputs["negative_prompt"] = wish.negative_prompt
    if model == "wan":
        inputs["num_frames"] = WAN_FRAMES
    return inputs
