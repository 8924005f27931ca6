"""Reads images that are not trusted. Converts them to RGB as vLLM's own server does."""

from contextlib import suppress
from typing import IO

from PIL import Image, ImageOps

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import FORMATS, DecodedBytes, MediaKind, damaged, reading

RGB_BYTES = 3
"""The size of a pixel of a decoded image or video."""
# A model that resizes the shorter side to a fixed length would enlarge a narrow image to an enormous size.
_MAX_SIDE_RATIO = 200


def read_image(content: IO[bytes], decoded: DecodedBytes) -> Image.Image:
    """Decodes the first image of an open file as RGB, upright, with transparent pixels on white.

    Adds its decoded size to `decoded`. Raises the errors of `reading`, `check_sides` and `DecodedBytes.add`.
    """
    with reading("image"):
        # Some of Pillow's other formats start other programs.
        image = Image.open(content, formats=list(FORMATS["image"]))
        check_sides("image", image.width, image.height)
        decoded.add(image.width * image.height * RGB_BYTES, "image")
        image.load()
        upright: Image.Image = image
        # The orientation may be damaged, although the image is not.
        with suppress(Exception):
            upright = ImageOps.exif_transpose(image)
        return _to_rgb(upright)


def check_sides(kind: MediaKind, width: int, height: int) -> None:
    """Raises InvalidRequestError (INVALID_MEDIA) if an image or video is empty or too narrow."""
    if min(width, height) < 1:
        raise damaged(kind, f"it is {width} by {height} pixels")
    if max(width, height) > _MAX_SIDE_RATIO * min(width, height):
        raise InvalidRequestError(
            f"the {kind} is {width} by {height} pixels; one side may be at most {_MAX_SIDE_RATIO} times the other",
            reason="INVALID_MEDIA",
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    # vLLM ignores the transparent color of an image that has no alpha channel.
    if image.mode == "RGB" or not image.has_transparency_data:
        return image.convert("RGB")
    colors = image.convert("RGBA")
    opaque = Image.new("RGB", image.size, "white")
    opaque.paste(colors, mask=colors.getchannel("A"))
    return opaque
