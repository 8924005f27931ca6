"""A child process with all of its descendants: a process group that ends as a whole."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TERMINATE_S = 15.0


class Child:
    """A running process whose output is written to a log file."""

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
        """Waits until the process has ended, kills its group, and returns the exit status.

        The status is the negative number of the signal if a signal killed the process.
        """
        status = await self._process.wait()
        self._kill_group()
        return status

    async def stop(self, *, terminate_s: float = TERMINATE_S) -> None:
        """Sends SIGTERM to the process. Kills its group when the process has ended, or after `terminate_s` seconds.

        Does nothing if the process has already ended.
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
