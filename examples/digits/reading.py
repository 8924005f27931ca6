"""Handwritten digits for training, and a classifier that recognizes the digit in an image.

Both come with scikit-learn: 1,797 real digits of 8 x 8 pixels, scaled up, and a support vector machine trained on them.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

SIZE = 32
"""Height and width of an image in pixels."""


def real_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns the images, [n, 32, 32], white on black, and the digit in each, [n]."""
    dataset = load_digits()
    brightest = 16
    small = (dataset.images * (255 / brightest)).astype(np.uint8)
    return np.stack([_resized(Image.fromarray(image)) for image in small]), dataset.target.astype(np.int64)


def train_reader() -> SVC:
    """Trains a classifier of rows of 32 * 32 pixels in [0, 1]. Takes about three seconds and is deterministic."""
    images, digits = real_digits()
    return SVC().fit(_rows(images), digits)


def read(images: Sequence[Image.Image]) -> list[int]:
    """Returns the digit in each image. Images of another size are scaled. The first call trains the classifier."""
    pixels = np.stack([_resized(image.convert("L")) for image in images])
    return [int(digit) for digit in _reader().predict(_rows(pixels))]


@cache
def _reader() -> SVC:
    return train_reader()


def _resized(image: Image.Image) -> NDArray[np.uint8]:
    """Scales an image. Pillow returns the image itself if it already has the size."""
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.uint8)


def _rows(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    return pixels.reshape(len(pixels), -1) / 255.0
