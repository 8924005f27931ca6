"""What a launcher tells about its processes."""

from dataclasses import dataclass
from enum import Enum

ORCHESTRATOR = "orchestrator"


class ProcessState(Enum):
    """Where a process stands; the value is the word that people see."""

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
    """A process as it is now; `name` is its replica's, or "orchestrator"."""

    name: str
    stage: str
    endpoint: str
    state: ProcessState
    detail: str = ""
    process_id: int | None = None
