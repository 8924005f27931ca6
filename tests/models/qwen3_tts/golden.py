"""The golden values of Qwen3-TTS. tools/golden/qwen3_tts.py writes them, and describes them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STRIDE, MEL_STRIDE = 97, 12
ELEMENTS = 16
_FILE = Path(__file__).parents[1] / "golden/qwen3_tts.npz"


@cache
def arrays() -> dict[str, npt.NDArray[Any]]:
    """Returns all values by name."""
    with np.load(_FILE) as file:
        return dict(file)


def requests() -> dict[str, dict[str, Any]]:
    """Returns the requests by name."""
    described: dict[str, dict[str, Any]] = json.loads(str(arrays()["request"]))
    return described
