"""Generates images with the `__call__` of tiny pipelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch

diffusers: Any = _diffusers
"""Untyped, because its annotations are incomplete, and wrong if an optional dependency is missing."""

WAN_FRAMES = 9


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


def classic_image(model: str, pipeline: Any, spec: ImageSpec, **more: Any) -> torch.Tensor:
    """Returns the image of the pipeline's own `__call__`, which receives `more` arguments, too."""
    inputs: dict[str, Any] = {
        "prompt": spec.prompt,
        "num_inference_steps": spec.steps,
        "height": spec.height,
        "width": spec.width,
        "generator": torch.Generator().manual_seed(spec.seed),
        "output_type": "pt",
        "true_cfg_scale" if model == "qwen-image" else "guidance_scale": spec.scale,
    }
    if model != "flux":
        inputs["negative_prompt"] = spec.negative_prompt
    if model.startswith("wan"):
        inputs["num_frames"] = WAN_FRAMES
    made: torch.Tensor = pipeline(**inputs, **more)[0]
    return made


def load(folder: Path, dtype: torch.dtype = torch.float32, **parts: Any) -> Any:
    """Loads the classic pipeline, with some given `parts`."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
