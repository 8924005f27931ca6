"""Generates images with tiny pipelines: with their `__call__`, and with their modular form."""

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
"""For float32 images of the modular form. If it is not 0, `__call__` denoises both guidance branches in one forward
pass, and the modular form in two."""


@dataclass(frozen=True)
class ImageSpec:
    """The parameters of an image."""

    prompt: str = "a red cube"
    negative_prompt: str = "blur"
    seed: int = 0
    height: int = 64
    width: int = 64
    steps: int = 4
    scale: float = 3.0


def classic_image(model: str, pipeline: Any, spec: ImageSpec) -> torch.Tensor:
    """Returns the image of the pipeline's own `__call__`."""
    guidance = {"true_cfg_scale": spec.scale} if model == "qwen-image" else {"guidance_scale": spec.scale}
    output = pipeline(**_common(model, spec), **guidance)
    made: torch.Tensor = output[0]
    return made


def modular_inputs(model: str, spec: ImageSpec) -> dict[str, Any]:
    """Returns the inputs of the blocks. All families except Flux read the scale from the guider."""
    guidance = {"guidance_scale": spec.scale} if model == "flux" else {}
    return {**_common(model, spec), **guidance}


def modular_image(model: str, pipeline: Any, spec: ImageSpec) -> torch.Tensor:
    """Returns the image of the modular form."""
    if model != "flux":
        pipeline.update_components(guider=guider(model, spec))
    made: torch.Tensor = pipeline(**modular_inputs(model, spec), output="videos" if model == "wan" else "images")
    return made


def guider(model: str, spec: ImageSpec) -> Any:
    """Returns a guider. Z-Image's scale without guidance is 0, that of the others is 1."""
    return diffusers.ClassifierFreeGuidance(guidance_scale=spec.scale, use_original_formulation=model == "z-image")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the classic pipeline."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_modular(model: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the modular form. `ModularPipeline.from_pretrained` would import every pipeline of diffusers."""
    pipeline = getattr(diffusers, BLOCKS[model])().init_pipeline(str(folder))
    pipeline.load_components(dtype=dtype)
    for block in pipeline.blocks.get_execution_blocks(prompt="").sub_blocks.values():
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    return pipeline


def _common(model: str, spec: ImageSpec) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "prompt": spec.prompt,
        "num_inference_steps": spec.steps,
        "height": spec.height,
        "width": spec.width,
        "generator": torch.Generator().manual_seed(spec.seed),
        "output_type": "pt",
    }
    if model != "flux":
        inputs["negative_prompt"] = spec.negative_prompt
    if model == "wan":
        inputs["num_frames"] = WAN_FRAMES
    return inputs
