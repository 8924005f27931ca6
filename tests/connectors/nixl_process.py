"""A process with a nixl connector, controlled by JSON lines on its standard input, and the client that controls it.

`nixl_process` starts this module as a program. Written bytes follow from a seed, so that the reader can check them.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil

from stagemesh.common.errors import StagemeshError
from stagemesh.connectors.arena.arena import Arena, Written
from stagemesh.connectors.base import ArenaRange, Bytes, FetchingReader, MemoryAccount, Producer
from stagemesh.connectors.nixl.connector import NixlConnector
from tests.repository.commands import ROOT

INCARNATION = "1"
_COMMAND_TIMEOUT_S = 20.0


def content(size_bytes: int, seed: int) -> Bytes:
    """Returns random bytes that follow from the seed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


class Replica:
    """Both sides of a connector. Every method is a command."""

    def __init__(self, name: str, *, arena_bytes: int, landing_bytes: int) -> None:
        self._arena = Arena(arena_bytes)
        landing = Arena(landing_bytes)

        async def make_landing() -> Arena:
            return landing

        self._landing = landing
        self._connector = NixlConnector(self._arena, landing=make_landing, replica=name, incarnation=INCARNATION)
        self._readers: dict[str, FetchingReader] = {}
        self._written: dict[int, Written] = {}
        self._kept: list[list[Bytes]] = []

    async def offer(self) -> dict[str, Any]:
        return {"offer": (await self._connector.offer()).hex()}

    async def write(self, sizes: Sequence[int], seed: int) -> dict[str, Any]:
        tensors = {str(number): content(size, seed + number) for number, size in enumerate(sizes)}
        written = await self._arena.write(tensors, MemoryAccount())
        region = written.region
        self._written[region.generation] = written
        start = self._arena.address
        return {"places": [[x.ctypes.data - start, x.nbytes, region.generation] for x in written.tensors.values()]}

    async def free(self, generation: int) -> dict[str, Any]:
        self._written.pop(generation).region.release()
        return {}

    async def connect(self, offer: str, replica: str) -> dict[str, Any]:
        reader = await self._connector.connect(bytes.fromhex(offer), Producer(replica, INCARNATION, None))
        assert isinstance(reader, FetchingReader)
        self._readers[replica] = reader
        return {}

    async def fetch(self, replica: str, places: list[list[int]], seed: int, *, keep: bool = False) -> dict[str, Any]:
        views = await self._readers[replica].fetch([ArenaRange(*place) for place in places], MemoryAccount())
        if keep:
            self._kept.append(views)
        wanted = (content(place[1], seed + number) for number, place in enumerate(places))
        return {"intact": all(np.array_equal(view, want) for view, want in zip(views, wanted, strict=True))}

    async def drop(self) -> dict[str, Any]:
        self._kept.clear()
        return {}

    async def leave(self, replica: str) -> dict[str, Any]:
        await self._readers.pop(replica).close()
        return {}

    async def close(self) -> dict[str, Any]:
        await self._connector.close()
        return {}

    async def usage(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": used.ru_utime + used.ru_stime, "landing_bytes": self._landing.used_bytes}


class Driven:
    """A running process. A command returns its answer with `took_s`. An error is in `error` and `reason`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.name = name
        self.process = process
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([number, command, arguments]).encode() + b"\n")
        return await asyncio.wait_for(self._answers[number], _COMMAND_TIMEOUT_S)

    async def connect(self, producer: "Driven") -> dict[str, Any]:
        """Connects to another process by its offer."""
        return await self.do("connect", offer=(await producer.do("offer"))["offer"], replica=producer.name)

    async def read(self, producer: "Driven", sizes: Sequence[int], *, seed: int = 1) -> dict[str, Any]:
        """Makes the producer write, and fetches the bytes."""
        places = (await producer.do("write", sizes=sizes, seed=seed))["places"]
        return await self.do("fetch", replica=producer.name, places=places, seed=seed)

    async def end(self) -> None:
        for process in self._family():
            process.kill()
        await self.process.wait()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    def signal(self, number: int) -> None:
        """Sends a signal to the process itself, which may be the child of a command that enters namespaces."""
        self._family()[-1].send_signal(number)

    def _family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            number, answer = json.loads(line)
            self._answers[number].set_result(answer)


@asynccontextmanager
async def nixl_process(
    name: str,
    *,
    within: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    arena_bytes: int = 64 << 20,
    landing_bytes: int = 64 << 20,
) -> AsyncIterator[Driven]:
    """Runs a process, through the command `within` if it is given."""
    command = [*within, sys.executable, "-m", "tests.connectors.nixl_process"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(name, str(arena_bytes), str(landing_bytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A command that enters namespaces changes the working directory.
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        limit=1 << 20,
    )
    driven = Driven(process, name)
    try:
        yield driven
    finally:
        await driven.end()


async def _answer(replica: Replica, line: bytes) -> None:
    number, command, arguments = json.loads(line)
    start = time.monotonic()
    try:
        answer = await getattr(replica, command)(**arguments)
    except StagemeshError as exc:
        answer = {"error": type(exc).__name__, "reason": exc.reason, "message": exc.message}
    answer["took_s"] = time.monotonic() - start
    print(json.dumps([number, answer]), flush=True)


async def _main(name: str, arena_bytes: int, landing_bytes: int) -> None:
    replica = Replica(name, arena_bytes=arena_bytes, landing_bytes=landing_bytes)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        async for line in lines:
            tasks.create_task(_answer(replica, line))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
