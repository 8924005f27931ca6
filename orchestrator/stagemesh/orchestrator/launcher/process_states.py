"""The states of the launcher's processes."""

from dataclasses import dataclass
from enum import Enum

ORCHESTRATOR = "orchestrator"


class ProcessState(Enum):
    """The state of a process. The value is the word that users see."""

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
    """The state of a process at one moment. `name` is the name of its replica, or "orchestrator"."""

    name: str
    stage: str
    endpoint: str
    state: ProcessState
    detail: str = ""
    process_id: int | None = None
