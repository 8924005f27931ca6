"""One child process with all its offspring: a process group that ends as a whole."""

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
        """Starts `command` in a session, and so a process group, of its own."""
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
        """The process, and its group."""
        return self._process.pid

    async def wait(self) -> int:
        """Returns the exit status (negative: the signal) once the process has ended and its offspring is killed."""
        status = await self._process.wait()
        self._kill_group()
        return status

    async def stop(self, *, terminate_s: float = TERMINATE_S) -> None:
        """Asks the process to end by SIGTERM, and after `terminate_s` kills it. Nothing of its group is left.

        Stopping what has ended is harmless.
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
