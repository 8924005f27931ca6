"""Small real processes for tests of supervisors, with a probe that reads their state from a file."""

import asyncio
import os
import select
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from stagemesh.cli.launcher.probes import Observation, ProcessState, ProcessStatus
from stagemesh.cli.launcher.supervisor import ProcessSpec, RestartPolicy, Supervisor

QUICK = RestartPolicy(first_pause_s=0.01, max_pause_s=0.02, quick_failures=3)
SLEEPER = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('here', flush=True); time.sleep(60)"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
)


class Supervised:
    """A supervisor with the statuses that it reports."""

    def __init__(self, folder: Path, program: str) -> None:
        self.log = folder / "p.log"
        self.statuses: asyncio.Queue[ProcessStatus] = asyncio.Queue()
        spec = ProcessSpec(
            name="p-0",
            stage="p",
            endpoint="127.0.0.1:1",
            command=(sys.executable, "-c", program),
            log=self.log,
            probe=self._probe,
        )
        self.supervisor = Supervisor(spec, policy=QUICK, listener=self.statuses.put_nowait)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[ProcessStatus]:
        """Runs the supervisor until the block ends, and yields the status of the process when it is ready."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.supervisor.run())
            yield await self.until(ProcessState.READY)
            running.cancel()

    async def _probe(self, channel: grpc.aio.Channel) -> Observation | None:
        """Reports a process as ready after it has written its first line."""
        written = self.log.exists() and self.log.read_text().endswith("\n")
        return Observation(ProcessState.READY, "") if written else None

    async def until(self, state: ProcessState) -> ProcessStatus:
        """Returns the next status with this state."""
        while (status := await self.statuses.get()).state is not state:
            pass
        return status


def ended(process_id: int, *, within_s: float = 5.0) -> bool:
    """Returns whether a process that is not our child ends in time, according to the kernel."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)
