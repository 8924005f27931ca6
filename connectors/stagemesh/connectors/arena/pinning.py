"""Page-locked arenas, so that copies between them and a CUDA device are asynchronous and as fast as the bus.

Apart from `arena`, which knows nothing of torch.
"""

import sys
from importlib import import_module
from typing import Any

from stagemesh.common.errors import NotReadyError
from stagemesh.connectors.arena.arena import Arena


def can_pin() -> bool:
    """Whether this process uses torch, and torch a CUDA device. Does not import it."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def pin(arena: Arena) -> None:
    """Page-locks an arena for as long as the process lives; raises NotReadyError where CUDA refuses."""
    torch: Any = import_module("torch")
    code = int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.file_bytes, 0))
    if code:
        raise NotReadyError(
            f"CUDA cannot pin the arena of {arena.file_bytes} bytes (error {code}); raise the limit on locked memory, "
            "or lower data_plane.arena_bytes",
            reason="CANNOT_PIN",
        )
