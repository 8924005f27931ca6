"""The memory of a device and of its process: its release when it is not used any more, and frozen objects."""

import ctypes
import gc
import sys

import torch


def release_unused_memory() -> None:
    """Runs the garbage collector, then returns unused memory to the device and to the operating system."""
    # Models contain reference cycles, and a stage process excludes loaded objects from garbage collection.
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def freeze_loaded_objects() -> None:
    """Freezes all objects that exist now (`gc.freeze`), so that the garbage collector skips them.

    Does nothing unless the process already froze objects at startup.
    """
    if gc.get_freeze_count() > 0:
        gc.collect()
        gc.freeze()
