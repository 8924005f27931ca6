"""A child process with all of its descendants: a process group that ends as a whole."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TERMINATE_S = 15.0


class Child:
    """A running process whose output goes to a log file."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], *, log: Path) -> "Child":
        """Starts `command` in a new session, and therefore in a new process group."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process)

    @property
    def process_id(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    async def wait(self) -> int:
        """Returns the exit status (negative: the signal) after the process has ended and its group was killed."""
        status = await self._process.wait()
        self._kill_group()
        return status

    async def stop(self, *, terminate_s: float = TERMINATE_S) -> None:
        """Sends SIGTERM to the process, and kills its group when it ends or after `terminate_s`.

        Does nothing if the process has ended.
        """
        if self._process.returncode is not None:
            return
        try:
            with suppress(ProcessLookupError, TimeoutError):
                self._process.terminate()
                await asyncio.wait_for(self._process.wait(), terminate_s)
        finally:
            self._kill_group()
        await self._process.wait()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
