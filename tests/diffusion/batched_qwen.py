"""How far requests of Qwen-Image in one forward are from each alone: `python -m tests.diffusion.batched_qwen FOLDER`.

Prints the largest difference of all pictures as a number, and how many forwards there were for how many calls. A
process of its own, as a matrix library reads its environment when it is loaded.
"""

import sys
from pathlib import Path

import torch

from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from tests.diffusion.tiny_calls import Wish
from tests.diffusion.turns import alone, together

WISHES = (
    Wish(prompt="a red cube on a table"),
    Wish(prompt="two dogs and a very long tail", seed=7, height=64, width=96, steps=6, scale=5.0),
    Wish(prompt="x of y and z", seed=3, height=96, width=64, steps=3, scale=2.0),
    Wish(prompt="four", seed=4, height=128, width=128, steps=4, scale=1.0),
)


def main(folder: str, dtype: str) -> None:
    """See above."""
    torch.set_num_threads(1)
    pipeline = ModularStepPipeline(Path(folder), getattr(torch, dtype))
    expected = [alone("qwen-image", pipeline, wish) for wish in WISHES]
    forwards: list[int] = []
    hook = pipeline.components.transformer.register_forward_hook(lambda *_: forwards.append(1))
    made = together("qwen-image", pipeline, WISHES)
    hook.remove()
    calls = sum(wish.steps * (1 if wish.scale == 1 else 2) for wish in WISHES)
    worst = max((one - other).abs().max().item() for one, other in zip(made, expected, strict=True))
    print(worst, len(forwards), calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
