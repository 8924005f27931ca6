"""One worker's process, as the stage process sees it."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from stagemesh.common.errors import UnavailableError
from stagemesh.common.settings import variables
from stagemesh.services.engines.diffusion.parallel.rank_messages import Reply, framed, received

_MODULE = "stagemesh.services.engines.diffusion.parallel.rank"
_END_GRACE_S = 5.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # All ranks are on this host.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


class RankProcess:
    """Made by `start_rank`, on the thread that lives as long as this process."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._name, self._process, self._reader, self._writer = name, process, reader, writer

    async def ask(self, message: Any) -> Reply:
        """Its answer; raises UnavailableError saying how it ended where it has."""
        try:
            self._writer.write(framed(message))
            await self._writer.drain()
            reply: Reply = await received(self._reader)
        except (EOFError, OSError) as exc:
            raise UnavailableError(await self.ended()) from exc
        return reply

    async def ended(self) -> str:
        """Waits until it has ended; says how."""
        status = await self._process.wait()
        cause = f" ({signal.Signals(-status).name})" if status < 0 else ""
        return f"{self._name} has ended with exit status {status}{cause}; its own log says why"

    def kill(self) -> None:
        """Ends it at once; nothing if it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Ends it: it does so itself when nobody is left to listen to, and is made to where it does not."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        try:
            async with asyncio.timeout(_END_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid


async def start_rank(name: str) -> RankProcess:
    """Starts a worker's process, called `name` in errors; the first thing that it is to be asked is a `Setup`."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            str(theirs.fileno()),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=_ENVIRONMENT | variables(),
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return RankProcess(name, process, reader, writer)
