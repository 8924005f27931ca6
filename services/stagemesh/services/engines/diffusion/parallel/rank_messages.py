"""Messages between a stage process and its ranks, which are worker processes.

The processes exchange pickled messages over a `multiprocessing.connection.Connection`. Pickling is safe here, because
both processes run this project's code and no other process can access the socket pair.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.services.engines.diffusion.options import DiffusionOptions


@dataclass(frozen=True)
class RankSetup:
    """The first message to a rank, which configures the rank's worker. The rank replies after it has created the
    worker."""

    folder: Path
    options: DiffusionOptions
    rank: int
    store: Path
    """Path of the file through which the ranks connect to each other. The file must not exist yet."""


@dataclass(frozen=True)
class RankCall:
    """A message that asks a rank to call a method of the rank's `DiffusionWorker`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class RankReply:
    """A rank's reply to a `RankSetup` or a `RankCall`."""

    value: Any = None
    """Return value of the method on rank 0. None on other ranks."""
    error: StagemeshError | None = None
    failures: tuple[str | None, ...] = ()
    """Error reasons, which show whether all ranks had the same outcome.

    Contains the reason of the raised error. If the method returned a list of errors, contains the reason of each error,
    and None for each success. Empty otherwise. If the failures of two ranks differ, the ranks have diverged.
    """
