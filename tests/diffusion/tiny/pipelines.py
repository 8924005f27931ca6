"""The tiny pipelines that tests of the diffusion engine share. `calls` uses the same names."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from stagemesh.tiny_models.diffusion.pipelines import tiny_pipeline
from tests.diffusion.tiny.calls import load


def _write(name: str, folder: Path) -> Path:
    pipeline = tiny_pipeline(name)
    assert pipeline is not None
    pipeline.write(folder)
    return folder


def write_qwen_image(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Qwen-Image, optionally in another data type."""
    _write("qwenimage", folder)
    if dtype != torch.float32:
        load(folder, dtype).save_pretrained(folder)
    return folder


WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "qwen-image": write_qwen_image,
    "flux": partial(_write, "flux"),
    "sd3": partial(_write, "stable-diffusion-3"),
    "wan": partial(_write, "wan"),
    "wan-2.2": partial(_write, "wan2.2"),
    "z-image": partial(_write, "z-image"),
}
"""The functions that write a tiny pipeline into a folder."""
write_qwen_image_edit = partial(_write, "qwenimage-edit")
write_helios = partial(_write, "helios")
write_ltx2 = partial(_write, "ltx2")
