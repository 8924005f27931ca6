"""Messages between a stage process and its worker processes, the ranks.

The processes exchange them over a `multiprocessing.connection.Connection`. Both ends run this project's own code, and
no other process can access the socket pair.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.services.engines.diffusion.options import DiffusionOptions


@dataclass(frozen=True)
class RankSetup:
    """The first message to a rank. The rank replies after it has created its worker."""

    folder: Path
    options: DiffusionOptions
    rank: int
    store: Path
    """Path of a file that does not exist yet. All ranks connect to each other through it."""


@dataclass(frozen=True)
class RankCall:
    """A request to a rank to call a method of its `DiffusionWorker`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class RankReply:
    """The result of a call or of the setup."""

    value: Any = None
    """The returned value. None from all ranks except rank 0."""
    error: StagemeshError | None = None
    failures: tuple[str | None, ...] = ()
    """The reason of the raised error, or the reason of each returned error and None for each success.

    If the failures of two ranks differ, the ranks have diverged.
    """
