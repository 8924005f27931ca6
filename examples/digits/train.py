"""Trains the digits pipeline: diffusers' own Qwen-Image classes, tiny, on scikit-learn's digits. Takes a few minutes.

Run it in the repository's root: OMP_NUM_THREADS=1 python -m examples.digits.train
"""

import argparse
import time
from importlib.metadata import version
from pathlib import Path

import torch
from examples.digits.blank import Pipeline, blank_pipeline
from examples.digits.learning import learn_pictures, learn_prompts
from examples.digits.prompts import NAMES, NO_PROMPTS, all_prompts, prompt
from examples.digits.reading import SIZE, read, real_digits

AUTOENCODER_STEPS = 250
READ_EACH = 8
"""The number of generated images of each digit that are classified."""


def main() -> None:
    """Trains, evaluates and saves the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800, help="of the transformer; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    pipeline = train(steps=arguments.steps, seed=arguments.seed)
    pipeline.save_pretrained(arguments.output)
    print(f"trained in {time.process_time() - started:.0f} s of processor time, saved in {arguments.output}")
    right = count_right(pipeline)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "scikit-learn"))
    print(f"seed {arguments.seed}, steps {AUTOENCODER_STEPS} + {arguments.steps}, {versions}")
    print(f"{right} of {READ_EACH * len(NAMES)} generated digits are read as prompted")


def train(*, steps: int, seed: int) -> Pipeline:
    """Returns a pipeline that generates digits. On one machine, the same seed gives the same pipeline."""
    pixels, digits = real_digits()
    images = (torch.from_numpy(pixels).float() / 127.5 - 1)[:, None, None].expand(-1, 3, -1, -1, -1)
    pipeline = blank_pipeline(all_prompts(), seed=seed)
    pipeline.set_progress_bar_config(disable=True)
    learn_pictures(pipeline.vae, images, steps=AUTOENCODER_STEPS)
    learn_prompts(pipeline, images, torch.from_numpy(digits), steps=steps)
    return pipeline


def count_right(pipeline: Pipeline) -> int:
    """Returns how many of 80 images show the requested digit. Eight per digit, each with its own seed."""
    right = 0
    for digit in range(len(NAMES)):
        generators = [torch.Generator().manual_seed(digit * READ_EACH + number) for number in range(READ_EACH)]
        images = pipeline(
            prompt=[prompt(digit)] * READ_EACH,
            negative_prompt=[NO_PROMPTS[-1]] * READ_EACH,
            true_cfg_scale=2.0,
            num_inference_steps=20,
            height=SIZE,
            width=SIZE,
            generator=generators,
        ).images
        right += sum(shown == digit for shown in read(images))
    return right


if __name__ == "__main__":
    main()
