"""Declares the operators of torchvision, so that a CUDA build of torchvision can be imported on a CPU."""

from importlib.util import find_spec
from pathlib import Path

import torch

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
