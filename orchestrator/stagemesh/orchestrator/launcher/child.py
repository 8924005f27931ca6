"""Starts and stops a child process together with all of its descendants, as a process group."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TERMINATE_S = 15.0


class Child:
    """A running child process. Its output is appended to a log file."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], *, log: Path) -> "Child":
        """Starts `command` in a new session and process group. Appends its output to the file `log`."""
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
        """The id of the process and of its process group."""
        return self._process.pid

    async def wait(self) -> int:
        """Waits until the process has ended, then kills its process group. Returns the exit status of the process.

        If a signal killed the process, the exit status is the negative signal number.
        """
        status = await self._process.wait()
        self._kill_group()
        return status

    async def stop(self, *, terminate_s: float = TERMINATE_S) -> None:
        """Sends SIGTERM to the process, waits for its end, and then kills its process group.

        Kills the group after `terminate_s` seconds if the process has not ended by then. Does nothing if the process
        has already ended.
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
