"""Carries the cause of a failed load from a vLLM worker to the replica.

vLLM reports to the replica only that its engine core has failed. The cause, for example the names of missing weights,
is known in the worker's process.
"""

import os
from contextlib import suppress
from pathlib import Path

from stagemesh.common.settings import library_variable, set_library_variables

_VARIABLE = "STAGEMESH_VLLM_LOAD_FAILURE"
_MAX_BYTES = 2_000


class LoadFailure:
    """The replica's side: an anonymous file into which workers that start afterwards write their first error."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("stagemesh-load-failure", os.MFD_CLOEXEC)
        set_library_variables({_VARIABLE: f"/proc/{os.getpid()}/fd/{self._fd}"}, replace=True)

    def read(self) -> str:
        """Returns the error that a worker has recorded, or an empty text."""
        return os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def record_failure(error: Exception) -> None:
    """Records an error in a worker's process, if no worker has recorded one.

    Does nothing in a worker on another node than the replica, which has only its own log.
    """
    with suppress(OSError), Path(library_variable(_VARIABLE)).open("r+b") as file:
        if not file.read(1):
            file.seek(0)
            text = " ".join([type(error).__name__ + ":", *str(error).split()])
            file.write(text.encode()[:_MAX_BYTES])
