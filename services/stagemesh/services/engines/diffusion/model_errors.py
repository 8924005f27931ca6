"""Conversion of the exceptions of models and schedulers to StagemeshErrors."""

import torch

from stagemesh.common.errors import InternalError, InvalidRequestError, OverloadedError, StagemeshError


def to_stagemesh_error(exc: Exception) -> StagemeshError:
    """Returns the StagemeshError that is reported to the caller for an exception of a model or scheduler.

    A ValueError becomes an InvalidRequestError, because models raise ValueError for inputs that they do not support.
    """
    if isinstance(exc, StagemeshError):
        return exc
    # torch reports that host memory is exhausted only in the text of a RuntimeError.
    if isinstance(exc, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(exc):
        return OverloadedError(
            f"the device does not have enough memory for the request in addition to the running requests: {exc}; "
            "request less, or lower the stage's max_running",
            reason="OUT_OF_MEMORY",
        )
    if isinstance(exc, ValueError):
        return InvalidRequestError(f"the model rejects the request: {exc}")
    return InternalError(f"the model failed: {type(exc).__name__}: {exc}", reason="ENGINE_ERROR")
