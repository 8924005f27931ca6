"""Page-locks arenas, so that copies to and from a CUDA device are asynchronous and use the full speed of the bus.

This module is separate from `arena` because `arena` must not depend on torch.
"""

import sys
from importlib import import_module
from typing import Any

from stagemesh.common.errors import NotReadyError
from stagemesh.connectors.arena.arena import Arena


def can_pin() -> bool:
    """Returns whether torch is already imported in this process and has a CUDA device. Does not import torch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def pin(arena: Arena) -> None:
    """Page-locks an arena for the lifetime of the process. Raises NotReadyError (CANNOT_PIN) if CUDA fails to do so."""
    torch: Any = import_module("torch")
    code = int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.file_bytes, 0))
    if code:
        raise NotReadyError(
            f"CUDA cannot pin the arena of {arena.file_bytes} bytes (error {code}); raise the limit on locked memory, "
            "or lower data_plane.arena_bytes",
            reason="CANNOT_PIN",
        )
