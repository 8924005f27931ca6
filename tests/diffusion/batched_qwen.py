"""Compares batched requests of Qwen-Image with single ones: `python -m tests.diffusion.batched_qwen FOLDER DTYPE...`.

Prints the `Comparison` of each data type. It needs its own process, because the matrix library reads its environment
when it is loaded.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.torch_setup import set_up_torch
from tests.diffusion.pipeline_runs import run_alone, run_together
from tests.diffusion.tiny.calls import ImageSpec

SPECS = (
    ImageSpec(prompt="a red cube on a table"),
    ImageSpec(prompt="two dogs and a very long tail", seed=7, height=64, width=96, steps=6, scale=5.0),
    ImageSpec(prompt="x of y and z", seed=3, height=96, width=64, steps=3, scale=2.0),
    ImageSpec(prompt="four", seed=4, height=128, width=128, steps=4, scale=1.0),
)


class Comparison(NamedTuple):
    """The largest difference of all images, and the numbers of forward passes and of transformer calls."""

    worst: float
    forwards: int
    calls: int


def compare(folder: Path, dtype: str) -> Comparison:
    """Runs the requests alone and together."""
    set_up_torch(torch.device("cpu"))
    pipeline = ModularStepPipeline(folder, stage_options({"dtype": dtype}))
    expected = [run_alone("qwen-image", pipeline, spec) for spec in SPECS]
    forwards: list[int] = []
    hook = pipeline.components.transformer.register_forward_hook(lambda *_: forwards.append(1))
    made = run_together("qwen-image", pipeline, SPECS)
    hook.remove()
    calls = sum(spec.steps * (1 if spec.scale == 1 else 2) for spec in SPECS)
    worst = max((one - other).abs().max().item() for one, other in zip(made, expected, strict=True))
    return Comparison(worst, len(forwards), calls)


if __name__ == "__main__":
    print(json.dumps([compare(Path(sys.argv[1]), dtype) for dtype in sys.argv[2:]]))
