"""The device of a worker: its selection, and the release of memory that is not used any more."""

import ctypes
import gc
import sys

import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.options import DiffusionOptions


def choose_device(options: DiffusionOptions, *, rank: int = 0) -> torch.device:
    """Returns the device on which a rank computes: the CPU, or a GPU. If the stage has several ranks, each rank uses a
    separate GPU.

    Raises NotReadyError if the machine has too few GPUs.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cpu" or (options.device == "auto" and not count):
        return torch.device("cpu")
    needed = options.parallel.ranks
    if count < needed:
        found = f"{count} GPUs" if count > 1 else "one GPU" if count else "no GPU"
        raise NotReadyError(
            f"the stage's options device ({options.device}) and parallel need {needed} GPUs, but this machine has "
            f"{found}; set device to cpu, or lower parallel"
            if needed > 1
            else "the stage's option device is cuda, but this machine has no GPU; set device to cpu or auto",
            reason="UNUSABLE_OPTION",
        )
    return torch.device("cuda", rank) if needed > 1 else torch.device("cuda")


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
