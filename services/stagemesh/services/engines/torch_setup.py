"""Sets up torch in a process: its device, threads, precision and memory, and torchvision's operators on a CPU.

No other module sets the state of torch that the engines and models of one process share.
"""

import ctypes
import gc
from importlib.util import find_spec
from pathlib import Path

import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.common.process.host import retain_tensor_memory
from stagemesh.common.process.settings import torch_threads


class UnusableOptionError(NotReadyError):
    """Raised if this machine, or the model, does not support the value of a stage's option."""

    default_reason = "UNUSABLE_OPTION"


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
        raise UnusableOptionError(
            f"the stage's options device ({device}) and parallel need {ranks} GPUs, but this machine has "
            f"{found}; set device to cpu, or lower parallel"
            if ranks > 1
            else "the stage's option device is cuda, but this machine has no GPU; set device to cpu or auto"
        )
    return torch.device("cuda", rank) if ranks > 1 else torch.device("cuda")


def set_up_torch(device: torch.device) -> None:
    """Sets the number of threads with which the calling thread computes on the CPU, because results depend on it.

    The number is that of `settings.torch_threads`. It does not depend on what torch or a library has set before.
    Threads that use torch later inherit the number. If the device is the CPU, the process also reuses the memory of
    freed tensors.
    """
    if device.type == "cpu":
        retain_tensor_memory()
    torch.set_num_threads(torch_threads())


def compute_float32_exactly() -> None:
    """Disables the rounding of the inputs of float32 convolutions to 10 bits, which is a GPU's default."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


_NAMES = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qroi_align(Tensor input) -> Tensor",
    *(f"{operator}(Tensor input) -> Tensor" for name in _NAMES for operator in (name, f"_{name}_backward")),
)
_libraries: list[torch.library.Library] = []
"""Contains the declarations, which exist as long as their library."""


def declare_operators() -> None:
    """Declares the operators if torch has no CUDA and torchvision's own library cannot be loaded.

    PyPI's wheels of torchvision are built for CUDA. On a CPU, `import torchvision` fails, because it refers to
    operators that its library would define. Processors of images and video do not call them. Call this before
    anything imports torchvision. vLLM does so in each of its processes (entry point `vllm.platform_plugins`).
    """
    torchvision = find_spec("torchvision")
    if _libraries or torch.version.cuda is not None or torchvision is None or torchvision.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(torchvision.origin).with_name("_C.so")))  # type: ignore[no-untyped-call]
    except OSError:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in _OPERATORS:
            library.define(operator)  # type: ignore[no-untyped-call]
        _libraries.append(library)


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
