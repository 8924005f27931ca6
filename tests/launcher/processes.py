"""Small real processes for a supervisor to keep, and a probe that reads their state from a file."""

import asyncio
import os
import select
import sys
from pathlib import Path

from stagemesh.orchestrator.launcher.probes import Observation
from stagemesh.orchestrator.launcher.process_states import ProcessState, ProcessStatus
from stagemesh.orchestrator.launcher.restart_policy import RestartPolicy
from stagemesh.orchestrator.launcher.supervisor import ProcessSpec, Supervisor

QUICK = RestartPolicy(first_pause_s=0.01, max_pause_s=0.02, quick_failures=3)
SLEEPER = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('here', flush=True); time.sleep(60)"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
)


class LogProbe:
    """Takes a process for ready once it has written its first line."""

    def __init__(self, log: Path) -> None:
        self._log = log

    async def look(self) -> Observation | None:
        written = self._log.exists() and self._log.read_text().endswith("\n")
        return Observation(ProcessState.READY, "") if written else None

    async def close(self) -> None:
        pass


class Watched:
    """A supervisor with the statuses that it reports."""

    def __init__(self, folder: Path, program: str) -> None:
        self.log = folder / "p.log"
        self.statuses: asyncio.Queue[ProcessStatus] = asyncio.Queue()
        spec = ProcessSpec(
            name="p-0",
            stage="p",
            endpoint="",
            command=(sys.executable, "-c", program),
            log=self.log,
            make_probe=lambda _endpoint: LogProbe(self.log),
        )
        self.supervisor = Supervisor(spec, policy=QUICK, report=self.statuses.put_nowait)

    async def until(self, state: ProcessState) -> ProcessStatus:
        """The next status with this state."""
        while (status := await self.statuses.get()).state is not state:
            pass
        return status


def ended(process_id: int, *, within_s: float = 5.0) -> bool:
    """Waits for the end of a process that is no child of ours, by the kernel's word for it."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)
