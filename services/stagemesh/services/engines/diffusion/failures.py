"""What models and schedulers raise, in our words."""

import torch

from stagemesh.common.errors import InternalError, InvalidRequestError, OverloadedError, StagemeshError


def named(exc: Exception) -> StagemeshError:
    """The error for whoever asked. A ValueError is a model's word for inputs that it does not take."""
    if isinstance(exc, StagemeshError):
        return exc
    # Of the host's memory torch says so in words alone.
    if isinstance(exc, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(exc):
        return OverloadedError(
            f"the device's memory does not hold the request beside those that run: {exc}; ask for less, or lower the "
            "stage's max_running",
            reason="OUT_OF_MEMORY",
        )
    if isinstance(exc, ValueError):
        return InvalidRequestError(f"the model refuses the request: {exc}")
    return InternalError(f"the model failed: {type(exc).__name__}: {exc}")
