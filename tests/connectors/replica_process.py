"""A replica's data plane in a process of its own, controlled by JSON lines over an inherited socket.

A command is {"id", "op", ...arguments}. The answer is {"id", "result"} or {"id", "error": {kind, reason, message}}.
Commands run concurrently. The process ends when the socket is closed, so that none outlives its test.
"""

import argparse
import asyncio
import gc
import itertools
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import uvloop

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.connectors.base import ArenaRange, Bytes, FetchingReader, MemoryAccount
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from tests.connectors.connector_names import named
from tests.connectors.contents import is_packet_of, packet_of
from tests.connectors.hosts import Host

EDGE = "a->b"


class _AddressedHost(Host):
    @classmethod
    async def started_at(cls, address: str, replica: str, limits: dict[str, int]) -> Self:
        """Starts a host at an address of this network namespace, at any free port unless the address names one."""
        host = cls(replica, **limits)
        host_name, _, port = address.partition(":")
        host.endpoint = f"{host_name}:{host.server.add_insecure_port(f'{host_name}:{port or 0}')}"
        await host.server.start()
        return host


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

    async def expect(self, *, request: str, producer: str, gated: bool = False, attempt: int = 1) -> None:
        """Opens an inlet. If `gated`, each packet needs an `allow`."""
        inlet = self._host.plane.open_inlet(EdgeKey(request, EDGE, attempt), producer=producer)
        self._readings[request] = _Reading(inlet, gated=gated)

    async def allow(self, *, request: str, packets: int | None = None) -> None:
        """Permits a gated reader to read that many more packets, or all of them."""
        reading = self._readings[request]
        reading.gated = reading.gated and packets is not None
        for _ in range(packets or 1):
            reading.permits.release()

    async def receive(self, *, request: str, size_bytes: int) -> dict[str, float]:
        """Reads a flow to its end and checks every byte; returns the number of packets and the duration."""
        reading = self._readings[request]
        started = time.monotonic()
        while await self._take(reading, request=request, size_bytes=size_bytes):
            reading.count += 1
        await reading.inlet.aclose()
        return {"count": reading.count, "seconds": time.monotonic() - started}

    async def send(
        self, *, request: str, endpoint: str, consumer: str, connector: str, count: int, size_bytes: int
    ) -> dict[str, Any]:
        """Sends a flow to its end; returns its connector, its size and the duration."""
        outlet = self._host.plane.open_outlet(
            EdgeKey(request, EDGE, 1),
            ConsumerAddress(consumer, endpoint),
            connector=named(connector),
            policy=StepPolicy(),
        )
        self._outlets[request] = outlet
        started = time.monotonic()
        for seq in range(count):
            await outlet.send(packet_of(request, seq, size_bytes))
        await outlet.finish()
        return {**self._usage(outlet), "seconds": time.monotonic() - started}

    async def progress(self, *, request: str) -> int:
        """Returns the number of packets sent or received so far."""
        if request in self._readings:
            return self._readings[request].count
        return self._outlets[request].usage.chunks if request in self._outlets else 0

    async def connector(self, *, request: str) -> str:
        """Returns the present connector of a flow."""
        return str(self._usage(self._outlets[request])["connector"])

    async def probe(self, *, consumer: str, endpoint: str, connector: str) -> dict[str, Any]:
        """Returns the connector that a flow would use, and the errors of better ones."""
        found = await self._host.plane.probe(ConsumerAddress(consumer, endpoint), named(connector))
        refusals = {name: error.message for name, error in found.refusals.items()}
        return {"connector": found.connector, "refusals": refusals}

    async def break_reads(self, *, after: int) -> None:
        """Makes nixl fail all reads except the first ones, as if its network broke."""
        from stagemesh.connectors.nixl.connector import NixlReader

        fetch, reads = NixlReader.fetch, itertools.count()

        async def fetch_or_fail(
            reader: NixlReader, places: Sequence[ArenaRange], account: MemoryAccount
        ) -> list[Bytes]:
            if next(reads) >= after:
                raise UnavailableError("the network is gone")
            return await fetch(reader, places, account)

        NixlReader.fetch = fetch_or_fail  # type: ignore[assignment,method-assign]
        NixlReader.fetch_at_once = FetchingReader.fetch_at_once  # type: ignore[method-assign]

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

    @staticmethod
    def _usage(outlet: Outlet) -> dict[str, Any]:
        return {"connector": outlet.attempt.connector, "chunks": outlet.usage.chunks}


async def answer(program: Program, command: dict[str, Any]) -> dict[str, Any]:
    """Runs one command."""
    number, operation = command.pop("id"), command.pop("op")
    try:
        return {"id": number, "result": await getattr(program, operation)(**command)}
    except StagemeshError as exc:
        error = {"kind": type(exc).__name__, "reason": exc.reason, "message": exc.message}
    except Exception as exc:  # noqa: BLE001 - every failure of a command is reported to the test
        error = {"kind": type(exc).__name__, "reason": "", "message": repr(exc)}
    return {"id": number, "error": error}


async def serve(control: socket.socket, *, replica: str, address: str, limits: dict[str, int]) -> None:
    """Answers commands until the socket is closed."""
    host = await _AddressedHost.started_at(address, replica, limits)
    reader, writer = await asyncio.open_connection(sock=control)
    _write(writer, {"id": 0, "result": {"endpoint": host.endpoint}})
    program = Program(host)
    async with asyncio.TaskGroup() as group:

        async def run(command: dict[str, Any]) -> None:
            _write(writer, await answer(program, command))

        tasks: list[asyncio.Task[None]] = []
        while line := await reader.readline():
            tasks.append(group.create_task(run(json.loads(line))))
        for task in tasks:
            task.cancel()
    await host.close()


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def _memory_bytes() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line and line[0].startswith("Rss")}


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def main() -> None:
    """Runs until the test closes the socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--limits", type=json.loads, default={})
    options = parser.parse_args()
    control = socket.socket(fileno=options.control_fd)
    uvloop.run(serve(control, replica=options.replica, address=options.address, limits=options.limits))


if __name__ == "__main__":
    main()
