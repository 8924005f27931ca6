"""Memory that nobody needs, given back to the system."""

import ctypes
import gc
import sys

import torch


def give_back() -> None:
    """What nobody refers to any more goes back to the device, and to the system."""
    # Models are full of cycles, and a stage process has put what it had loaded out of the collector's sight.
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def settle() -> None:
    """What is loaded stays: the garbage collector need not look through it, where that is how this process began."""
    if gc.get_freeze_count() > 0:
        gc.collect()
        gc.freeze()
