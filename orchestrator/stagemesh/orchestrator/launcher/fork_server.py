"""Starts stage processes as forks of one process, which has imported the libraries of their engines."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import socket

from stagemesh.common.fork_request import ForkRequest, send_request, socket_pair


class ForkedProcess:
    """A process that the fork server has forked. Has the interface of `asyncio.subprocess.Process`."""

    def __init__(self, process_id: int, reports: asyncio.StreamReader) -> None:
        self.pid = process_id
        self.returncode: int | None = None
        self._reports = reports

    async def wait(self) -> int:
        """Waits until the process has terminated. Returns its exit status, or the negative number of a signal."""
        if self.returncode is None:
            line = await self._reports.readline()
            # When the server ends, the kernel kills the processes that it has forked.
            self.returncode = int(line) if line else -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM. Raises ProcessLookupError if the process has terminated."""
        os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """A process that imports libraries once, and forks the processes that need them."""

    def __init__(self, requests: socket) -> None:
        self._requests = requests

    @classmethod
    @asynccontextmanager
    async def running(cls, preload: Sequence[str], *, log: Path) -> AsyncGenerator["ForkServer"]:
        """Runs a server, and kills it and all processes that it has forked when the block is exited.

        `preload` contains the functions that import the libraries, as "module:function". The server writes its output
        to the file `log`.
        """
        command = [sys.executable, "-u", "-m", "stagemesh.services.stage.fork_server", "--parent-pid", str(os.getpid())]
        for function in preload:
            command += ["--preload", function]
        requests, served = socket_pair()
        with requests, log.open("ab") as output:
            with served:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=served.fileno(), stdout=output, stderr=asyncio.subprocess.STDOUT, process_group=0
                )
            try:
                yield cls(requests)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def fork(self, config: Path, *, log: Path) -> ForkedProcess | None:
        """Forks a process of the stage whose config file is `config`. Appends its output to the file `log`.

        Waits until the libraries have been imported. Returns None if the server has ended.
        """
        reports = asyncio.StreamReader()
        reading, writing = os.pipe()
        # At the end of the file, the event loop closes it.
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            with log.open("ab") as output:
                send_request(self._requests, ForkRequest(config, output.fileno(), writing))
        except OSError:
            return None
        finally:
            os.close(writing)
        try:
            line = await reports.readline()
        except asyncio.CancelledError:
            # The server kills a process whose id it cannot report.
            pipe.close()
            raise
        return ForkedProcess(int(line), reports) if line else None
