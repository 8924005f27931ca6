"""Which device a worker computes on."""

import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.options import DiffusionOptions


def device_of(options: DiffusionOptions, *, rank: int = 0) -> torch.device:
    """Each rank has a GPU of its own; raises NotReadyError where there are too few."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cpu" or (options.device == "auto" and not count):
        return torch.device("cpu")
    needed = options.parallel.ranks
    if count < needed:
        had = f"{count} GPUs" if count > 1 else "one GPU" if count else "no GPU"
        raise NotReadyError(
            f"the stage's options device ({options.device}) and parallel ask for {needed} of them, and there is {had}; "
            "set device to cpu, or parallel to fewer"
            if needed > 1
            else "the stage's option device is cuda, and there is no GPU; set it to cpu or auto"
        )
    return torch.device("cuda", rank) if needed > 1 else torch.device("cuda")
