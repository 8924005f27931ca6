"""Files of images."""

import io
from typing import Any

from PIL import Image


def encoded_image(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Returns the content of a file with this image. `options` are options of Pillow's encoder."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()
