"""The speakers of a Qwen2.5-Omni checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from stagemesh.services.models.checkpoint import load_error

FILE = "spk_dict.pt"


@dataclass(frozen=True)
class Speaker:
    """The properties of a speaker."""

    begin_token: int
    """The text token before the answer, which selects the speaker in the talker."""
    vector: Tensor
    """Represents the voice, float32[size]."""
    reference: Tensor
    """A mel spectrogram of the voice, float32[frames, mel size]."""


def load_speakers(folder: Path) -> dict[str, Speaker]:
    """Returns the speakers in the checkpoint's spk_dict.pt by name.

    Reads only tensors and plain values from the file, no other objects. Raises NotReadyError (LOAD_FAILED) if the file
    is missing or has other content.
    """
    try:
        content: Any = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        speakers = {str(name): _read(entry) for name, entry in content.items()}
    except OSError as exc:
        raise load_error(folder, f"its {FILE} cannot be read: {exc.strerror or exc}") from exc
    except (UnpicklingError, RuntimeError, EOFError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise load_error(folder, f"its {FILE} does not contain speakers ({exc}); copy it again") from exc
    if not speakers:
        raise load_error(folder, f"its {FILE} contains no speakers")
    return speakers


def _read(entry: Any) -> Speaker:
    reference: Tensor = entry["ref_mel"].float()
    return Speaker(int(entry["bos_token"]), entry["cond"].float().flatten(), reference.flatten(0, -2))
