"""Compares batched requests of Qwen-Image with single ones: `python -m tests.diffusion.batched_qwen FOLDER DTYPE`.

Prints the largest difference of all images, the number of forward passes, and the number of transformer calls. It is a
process of its own, because the matrix library reads its environment when it is loaded.
"""

import sys
from pathlib import Path

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


def main(folder: str, dtype: str) -> None:
    """Compares and prints."""
    set_up_torch(torch.device("cpu"))
    pipeline = ModularStepPipeline(Path(folder), stage_options({"dtype": dtype}))
    expected = [run_alone("qwen-image", pipeline, spec) for spec in SPECS]
    forwards: list[int] = []
    hook = pipeline.components.transformer.register_forward_hook(lambda *_: forwards.append(1))
    made = run_together("qwen-image", pipeline, SPECS)
    hook.remove()
    calls = sum(spec.steps * (1 if spec.scale == 1 else 2) for spec in SPECS)
    worst = max((one - other).abs().max().item() for one, other in zip(made, expected, strict=True))
    print(worst, len(forwards), calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
