"""A replica's data plane in a process of its own, controlled by JSON lines over an inherited socket.

A command is {"id", "op", ...arguments}. The answer is {"id", "result"} or {"id", "error": {kind, reason, message}}.
Commands run concurrently. The process ends when the socket is closed, so that none outlives its test.
"""

import argparse
import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from stagemesh.common.errors import StagemeshError
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.conformance import Host, send_all
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from tests.connectors.contents import is_packet_of, packet_of

EDGE = "a->b"


@dataclass
class _Reading:
    """A flow whose packets are read one by one, each after a permit of its gate."""

    inlet: Inlet
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    gated: bool = False
    count: int = 0


class Program:
    """The commands. Each method returns the fields of its answer."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._readings: dict[str, _Reading] = {}
        self._outlets: dict[str, Outlet] = {}

    async def expect(self, *, request: str, producer: str, gated: bool = False) -> None:
        """Opens an inlet. If `gated`, each packet needs an `allow`."""
        inlet = self._host.plane.open_inlet(EdgeKey(request, EDGE, 1), producer=producer)
        self._readings[request] = _Reading(inlet, gated=gated)

    async def allow(self, *, request: str, packets: int | None = None) -> None:
        """Permits a gated reader to read that many more packets, or all of them."""
        reading = self._readings[request]
        reading.gated = reading.gated and packets is not None
        for _ in range(packets or 1):
            reading.permits.release()

    async def receive(self, *, request: str, size_bytes: int) -> dict[str, int]:
        """Reads a flow to its end and checks every byte; returns the number of packets."""
        reading = self._readings[request]
        while await self._take(reading, request=request, size_bytes=size_bytes):
            reading.count += 1
        await reading.inlet.aclose()
        return {"count": reading.count}

    async def send(
        self, *, request: str, endpoint: str, consumer: str, connector: str, count: int, size_bytes: int
    ) -> dict[str, Any]:
        """Sends a flow to its end; returns its connector, its size and the duration."""
        outlet = self._host.plane.open_outlet(
            EdgeKey(request, EDGE, 1), ConsumerAddress(consumer, endpoint), connector=connector, policy=StepPolicy()
        )
        self._outlets[request] = outlet
        started = time.monotonic()
        await send_all(outlet, (packet_of(request, seq, size_bytes) for seq in range(count)))
        seconds = time.monotonic() - started
        return {"connector": outlet.attempt.connector, "chunks": outlet.usage.chunks, "seconds": seconds}

    async def progress(self, *, request: str) -> int:
        """Returns the number of packets sent or received so far."""
        if request in self._readings:
            return self._readings[request].count
        return self._outlets[request].usage.chunks if request in self._outlets else 0

    async def probe(self, *, consumer: str, endpoint: str, connector: str) -> dict[str, Any]:
        """Returns the connector that a flow would use, and the errors of better ones."""
        found = await self._host.plane.probe(ConsumerAddress(consumer, endpoint), connector)
        refusals = {name: error.message for name, error in found.refusals.items()}
        return {"connector": found.connector, "refusals": refusals}

    async def forget(self, *, request: str) -> None:
        """Closes a flow in any state."""
        self._outlets.pop(request, None)
        if reading := self._readings.pop(request, None):
            await reading.inlet.aclose()

    async def stats(self) -> dict[str, int]:
        """Returns memory in bytes, in total and outside of the arenas, open descriptors, and the arena's use."""
        gc.collect()
        memory = _memory_bytes()
        return {
            "private_bytes": memory["RssAnon"] + memory["RssFile"],
            "shared_bytes": memory["RssShmem"],
            "descriptors": _open_descriptors(),
            "tasks": len(asyncio.all_tasks()),
            "arena_used_bytes": self._host.plane.arena.used_bytes,
            "credit_bytes": self._host.plane.consumer.credit_bytes,
        }

    async def _take(self, reading: _Reading, *, request: str, size_bytes: int) -> bool:
        if reading.gated:
            await reading.permits.acquire()
        got: Packet | None = await anext(aiter(reading.inlet), None)
        if got is None:
            return False
        assert is_packet_of(got, request=request, seq=reading.count, size_bytes=size_bytes), (
            f"packet {reading.count} of {request} is not what was sent: {got.metadata}"
        )
        return True


async def answer(program: object, command: dict[str, Any]) -> dict[str, Any]:
    """Runs one command."""
    number, operation = command.pop("id"), command.pop("op")
    try:
        return {"id": number, "result": await getattr(program, operation)(**command)}
    except StagemeshError as exc:
        error = {"kind": type(exc).__name__, "reason": exc.reason, "message": exc.message}
    except Exception as exc:  # noqa: BLE001 - every failure of a command is reported to the test
        error = {"kind": type(exc).__name__, "reason": "", "message": repr(exc)}
    return {"id": number, "error": error}


async def serve(control: socket.socket, program: object, *, endpoint: str) -> None:
    """Answers commands, which are the methods of the program, until the socket is closed."""
    reader, writer = await asyncio.open_connection(sock=control)
    _write(writer, {"id": 0, "result": {"endpoint": endpoint}})
    async with asyncio.TaskGroup() as group:

        async def run(command: dict[str, Any]) -> None:
            _write(writer, await answer(program, command))

        tasks: list[asyncio.Task[None]] = []
        while line := await reader.readline():
            tasks.append(group.create_task(run(json.loads(line))))
        for task in tasks:
            task.cancel()


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def _memory_bytes() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line and line[0].startswith("Rss")}


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def main(start: Callable[[argparse.Namespace], AbstractAsyncContextManager[tuple[object, str]]]) -> None:
    """Runs until the test closes the socket. `start` yields the program for the options, and its endpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--limits", type=json.loads, default={})
    options = parser.parse_args()

    async def run() -> None:
        async with start(options) as (program, endpoint):
            await serve(socket.socket(fileno=options.control_fd), program, endpoint=endpoint)

    uvloop.run(run())


@asynccontextmanager
async def _data_plane(options: argparse.Namespace) -> AsyncIterator[tuple[Program, str]]:
    host = await Host.started(options.replica, listen=options.listen, **options.limits)
    try:
        yield Program(host), host.endpoint
    finally:
        await host.close()


if __name__ == "__main__":
    main(_data_plane)
