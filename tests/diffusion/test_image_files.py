"""Images that are computed from NaN or infinite values."""

import io
import warnings
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion.conversion import encode_file
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from stagemesh.services.engines.diffusion.worker import Decoded


def _frames(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    frames = np.ones((1, 3, 4, 4), np.float32)
    frames[0, :, 0, 0] = value
    return frames


@pytest.mark.parametrize(("value", "pixel"), [(np.nan, 0), (np.inf, 255), (-np.inf, 0), (0.5, 128)])
def test_each_value_becomes_a_pixel_without_a_warning(value: float, pixel: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = encode_file(_frames(value))
    with Image.open(io.BytesIO(file.tobytes())) as image:
        pixels = np.asarray(image)
    assert pixels[0, 0].tolist() == [pixel] * 3
    assert pixels[1, 1].tolist() == [255] * 3


@pytest.mark.parametrize(
    ("value", "non_finite"), [(np.nan, ("image", "frames")), (np.inf, ("image", "frames")), (0.5, ())]
)
async def test_the_engine_reports_values_that_are_not_finite(value: float, non_finite: tuple[str, ...]) -> None:
    (emission,) = await DiffusionEngine._results_of(
        cast("DiffusionEngine", None), Decoded(_frames(value)), Task("r", 0), {}
    )
    assert emission.non_finite == non_finite
