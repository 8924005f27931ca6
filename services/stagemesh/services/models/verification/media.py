"""Reads the images and audio files of a request for a reference implementation."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

AUDIO_RATE_HZ = 16_000


class RequestMedia(NamedTuple):
    """The media of a request, and the kind of each in order: "image" or "audio"."""

    kinds: tuple[str, ...]
    images: tuple[npt.NDArray[np.uint8], ...]
    """Each [height, width, 3]."""
    audio: tuple[npt.NDArray[np.float32], ...]
    """Each [samples], one channel at 16 kHz."""


def read_media(paths: Sequence[Path]) -> RequestMedia:
    """Reads image and audio files. The suffix of an image is .png, .jpg, .jpeg, .webp, .gif or .bmp."""
    kinds = tuple("image" if path.suffix.lower() in IMAGE_SUFFIXES else "audio" for path in paths)
    files = list(zip(kinds, paths, strict=True))
    return RequestMedia(
        kinds,
        tuple(_read_image(path) for kind, path in files if kind == "image"),
        tuple(_read_audio(path) for kind, path in files if kind == "audio"),
    )


IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


def _read_image(path: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image

    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def _read_audio(path: Path) -> npt.NDArray[np.float32]:
    import av

    resampler = av.AudioResampler(format="flt", layout="mono", rate=AUDIO_RATE_HZ)
    with av.open(str(path)) as container:
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        frames += resampler.resample(None)
        return np.concatenate([frame.to_ndarray()[0] for frame in frames])
