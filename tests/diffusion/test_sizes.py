"""Sizes, formats and negative prompts of requests become the inputs of a pipeline."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion import signature_of
from stagemesh.services.engines.diffusion.conversion import build_inputs, check_format, encode_file, size_warnings
from stagemesh.services.engines.diffusion.model.families import Family
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.options import request_options

IMAGES, VIDEOS = Family(size_multiple=16), Family(size_multiple=16, frames_multiple=4)
STAGE = DiffusionOptions(height=1328, width=1328)


def read(stage: DiffusionOptions = STAGE, **options: Any) -> tuple[DiffusionInputs, list[str]]:
    """Returns the inputs of a request with these options, and its warnings."""
    task = Task("r", 0, prompt="a cat", options=options)
    filled = request_options(options, signature_of(stage).options, stage="painter")
    inputs = build_inputs(task, filled, stage=stage, family=IMAGES)
    return inputs, [warning.message for warning in size_warnings(filled, inputs, IMAGES)]


@pytest.mark.parametrize(
    ("options", "size", "warnings"),
    [
        ({}, (1328, 1328), 0),
        ({"width": 1920, "height": 1088}, (1920, 1088), 0),
        ({"width": 1920, "height": 1080}, (1920, 1072), 1),
        ({"width": 1472, "height": 1140}, (1472, 1136), 1),
        ({"height": 17}, (1328, 16), 1),
        ({"aspect_ratio": "1:1"}, (1328, 1328), 0),
        ({"aspect_ratio": "16:9"}, (1776, 992), 0),
        ({"aspect_ratio": "9:16"}, (992, 1776), 0),
        ({"aspect_ratio": "4:3"}, (1536, 1152), 0),
    ],
)
def test_sizes_are_those_that_the_model_takes(options: Any, size: tuple[int, int], warnings: int) -> None:
    inputs, found = read(**options)
    assert (inputs.width, inputs.height) == size
    asked = f"{options.get('width', 1328)}x{options.get('height', 1328)}"
    text = f"the size {asked} was rounded to {size[0]}x{size[1]}, because the model takes multiples of 16"
    assert found == [text] * warnings


def test_a_strict_stage_rejects_sizes_that_the_model_does_not_take() -> None:
    strict = replace(STAGE, sizes="strict")
    with pytest.raises(InvalidRequestError, match="it must be a multiple of 16, such as 1072 or 1088"):
        read(strict, width=1920, height=1080)
    assert read(strict, aspect_ratio="16:9")[0].width == 1776


@pytest.mark.parametrize("negative_prompt", [None, "", "blur"])
def test_an_empty_negative_prompt_is_not_the_same_as_none(negative_prompt: str | None) -> None:
    task = Task("r", 0, prompt="a cat", negative_prompt=negative_prompt)
    inputs = build_inputs(task, {}, stage=STAGE, family=IMAGES)
    assert inputs.negative_prompt == negative_prompt


@pytest.mark.parametrize(("wanted", "made"), [("auto", "PNG"), ("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_an_image_has_the_requested_format(wanted: str, made: str) -> None:
    with Image.open(io.BytesIO(encode_file(np.ones((1, 3, 8, 8), np.float32), wanted).tobytes())) as image:
        assert (image.format, image.size) == (made, (8, 8))


@pytest.mark.parametrize("frames", [None, 9])
def test_a_video_has_no_format_of_images(frames: int | None) -> None:
    counted = {} if frames is None else {"num_frames": frames}
    check_format({"output_format": "webp", **counted}, VIDEOS)
    check_format({"output_format": "png", **counted}, IMAGES)
    with pytest.raises(InvalidRequestError, match="option 'output_format' is 'png'; a video is made as webp"):
        check_format({"output_format": "png", **counted}, VIDEOS)
