"""States of the processes that the launcher runs."""

from dataclasses import dataclass
from enum import Enum

ORCHESTRATOR = "orchestrator"


class ProcessState(Enum):
    """The state of a process. The value is the word that is shown to users."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ProcessStatus:
    """A snapshot of a process's state.

    `name` is the name of the replica that the process serves, or "orchestrator".
    """

    name: str
    stage: str
    endpoint: str
    state: ProcessState
    detail: str = ""
    process_id: int | None = None
