"""Encoding of frames as an image file or a video file."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from stagemesh.common.tensors import Array

FRAMES_PER_SECOND = 16


def encode_file(frames: npt.NDArray[Any]) -> Array:
    """Encodes one frame as a PNG file, or several frames as a lossless animated WebP file.

    `frames` is float32[frames, 3, height, width] with values in [0, 1]. NaN becomes black. Returns the file's contents
    as uint8[bytes].
    """
    pixels = (
        (np.nan_to_num(frames, posinf=1.0, neginf=0.0).transpose(0, 2, 3, 1) * 255)
        .round()
        .clip(0, 255)
        .astype(np.uint8)
    )
    first, *others = [Image.fromarray(each) for each in pixels]
    file = io.BytesIO()
    if others:
        duration_ms = round(1000 / FRAMES_PER_SECOND)
        first.save(file, "WEBP", save_all=True, append_images=others, duration=duration_ms, loop=0, lossless=True)
    else:
        first.save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)
