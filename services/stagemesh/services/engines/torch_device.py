"""The device and the threads of torch in a stage's process."""

import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.common.host import retain_tensor_memory
from stagemesh.common.settings import library_variable


def choose_device(device: str, *, ranks: int = 1, rank: int = 0) -> torch.device:
    """Returns the device on which a rank computes. If the stage has several ranks, each rank uses a separate GPU.

    `device` is "cpu", "cuda" or "auto". "auto" selects a GPU if the machine has one, otherwise the CPU. Raises
    NotReadyError if the machine has too few GPUs.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not count):
        return torch.device("cpu")
    if count < ranks:
        found = f"{count} GPUs" if count > 1 else "one GPU" if count else "no GPU"
        raise NotReadyError(
            f"the stage's options device ({device}) and parallel need {ranks} GPUs, but this machine has "
            f"{found}; set device to cpu, or lower parallel"
            if ranks > 1
            else "the stage's option device is cuda, but this machine has no GPU; set device to cpu or auto",
            reason="UNUSABLE_OPTION",
        )
    return torch.device("cuda", rank) if ranks > 1 else torch.device("cuda")


def set_up_torch(device: torch.device) -> None:
    """Limits torch to one thread on the CPU, unless the user set OMP_NUM_THREADS. Affects the calling thread.

    If the device is the CPU, the process also reuses the memory of freed tensors.
    """
    if device.type == "cpu":
        retain_tensor_memory()
    if not library_variable("OMP_NUM_THREADS"):
        # Stages share a machine. With more threads in each stage, they would compete for the cores.
        torch.set_num_threads(1)
