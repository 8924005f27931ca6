"""Pictures in a terminal."""

import io

from rich.console import RenderableType

from stagemesh.client import Image

_COLUMNS = 48


def as_text(picture: Image) -> RenderableType | None:
    """A picture in half blocks, at most 48 columns wide; None where what draws it is not installed."""
    try:
        from PIL import Image as Pictures
        from rich_pixels import Pixels
    except ImportError:
        return None
    with Pictures.open(io.BytesIO(picture.data)) as opened:
        drawn = opened.convert("RGB")
    drawn.thumbnail((_COLUMNS, 2 * _COLUMNS))
    pixels: RenderableType = Pixels.from_image(drawn)
    return pixels
