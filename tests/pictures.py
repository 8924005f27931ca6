"""Files of images."""

import io

from PIL import Image


def encoded_image(image: Image.Image, file_format: str = "PNG") -> bytes:
    """Returns the content of a file with this image."""
    file = io.BytesIO()
    image.save(file, file_format)
    return file.getvalue()
