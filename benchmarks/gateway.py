"""Measures what the gateway costs over the gRPC client: the first token, processor time a token, and memory.

    python -m benchmarks.gateway --json out/gateway.json

A fake stage makes a token every 20 ms for each of 32 requests, which begin one after the other. The requests go to the
orchestrator with the Python client, and to the gateway as streamed chat completions, in alternation. Both clients run
in this process, and the one for HTTP only reads bytes.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient, Text
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.lifecycle import raise_open_files_limit
from stagemesh.gateway.config import GatewayConfig
from stagemesh.pipeline import load_pipeline

_PIPELINE = """\
pipeline: p
stages: {source: {engine: fake, function: source, options: {steps: 100, step_s: 0.02, max_running: 2000}}}
outputs: {text: source}
limits: {max_in_flight: 2000}
"""
_STEPS, _STEP_S = 100, 0.02
_STREAMS = 32
_IDLE_STREAMS = 1_000
_BODY = json.dumps({"model": "p", "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()


class Round(NamedTuple):
    """The median time to the first token, and the processor time of a process for each token, in seconds."""

    first_s: float
    cpu_s: float


@asynccontextmanager
async def gateway(endpoint: str) -> AsyncGenerator[tuple[str, int]]:
    """Runs a gateway of an orchestrator. Yields its address and the id of its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "stagemesh.gateway", "--config=-"]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None, "its input is a pipe"
    process.stdin.write(dump_config(GatewayConfig(listen, [[endpoint]])))
    process.stdin.close()
    try:
        await _until_served(listen)
        yield listen, process.pid
    finally:
        process.terminate()
        await process.wait()


async def _until_served(listen: str) -> None:
    while True:
        try:
            _, writer = await _connect(listen)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


async def _connect(listen: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listen.rpartition(":")
    return await asyncio.open_connection(host, int(port))


class Stream:
    """A connection for a chat completion that is streamed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def ask(self) -> None:
        """Sends the request."""
        fields = {"Host": "localhost", "Content-Length": len(_BODY), "Connection": "close"}
        lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        self._writer.write("\r\n".join((*lines, "Content-Type: application/json", "", "")).encode() + _BODY)

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()


async def _ask_gateway(listen: str) -> float:
    """Returns the time to the first token in seconds, on a connection that is open."""
    stream = Stream(*await _connect(listen))
    began_s = time.perf_counter()
    stream.ask()
    await stream.reader.readuntil(b'"content":"Step')
    first_s = time.perf_counter() - began_s
    rest = await stream.reader.read(-1)
    if b"[DONE]" not in rest:
        raise RuntimeError(f"the stream ended early: {rest[-300:]!r}")
    stream.close()
    return first_s


async def _ask_orchestrator(client: AsyncClient) -> float:
    """Returns the time to the first token in seconds."""
    began_s, first_s = time.perf_counter(), 0.0
    async for event in client.generate(messages=[("user", "hello")]):
        if isinstance(event, Text) and not first_s:
            first_s = time.perf_counter() - began_s
    return first_s


async def _spread(ask: Callable[[], Awaitable[float]]) -> list[float]:
    """Runs a request of each stream. They begin one after the other within the time of one request."""

    async def begin(number: int) -> float:
        await asyncio.sleep(number / _STREAMS * _STEPS * _STEP_S)
        return await ask()

    return await asyncio.gather(*(begin(number) for number in range(_STREAMS)))


async def measure(ask: Callable[[], Awaitable[float]], pid: int) -> Round:
    """Runs a round of requests. Measures the processor time of a process."""
    before_s = cpu_s(pid)
    first_s = await _spread(ask)
    return Round(statistics.median(first_s), (cpu_s(pid) - before_s) / (_STREAMS * _STEPS))


async def measure_memory(listen: str, pid: int) -> float:
    """Returns the memory of the gateway with 1,000 streams that wait for a token, in bytes."""
    streams = [Stream(*await _connect(listen)) for _ in range(_IDLE_STREAMS)]
    for stream in streams:
        stream.ask()
    for stream in streams:
        await stream.reader.readuntil(b'"role":"assistant"')
    used = resident_bytes(pid)
    for stream in streams:
        stream.close()
    return used


def resident_bytes(pid: int) -> float:
    """Returns the memory of a process in bytes."""
    return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(by_gateway: Sequence[Round], by_client: Sequence[Round], memory: float) -> list[Figure]:
    """Returns the figures of rounds in alternation."""
    median = statistics.median
    pairs = list(zip(by_gateway, by_client, strict=True))
    return [
        Figure(
            "first token, median, over the gRPC client",
            1e3 * median(a.first_s - b.first_s for a, b in pairs),
            "ms",
            "<=1.5",
        ),
        Figure("first token, median, gRPC client", 1e3 * median(each.first_s for each in by_client), "ms"),
        Figure(
            "processor time a token, over the gRPC client",
            1e6 * median(a.cpu_s - b.cpu_s for a, b in pairs),
            "us",
            "<=60",
        ),
        Figure("processor time a token, gateway", 1e6 * median(each.cpu_s for each in by_gateway), "us"),
        Figure("processor time a token, gRPC client", 1e6 * median(each.cpu_s for each in by_client), "us"),
        Figure("memory with 1,000 idle streams", memory / (1 << 20), "MB", "<=300"),
    ]


async def _run(rounds: int) -> list[Figure]:
    by_gateway: list[Round] = []
    by_client: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.yaml"
        path.write_text(_PIPELINE)
        launcher = Launcher(load_pipeline(str(path)), listen="127.0.0.1:0")
        async with launcher.running():
            await launcher.wait_ready()
            async with gateway(launcher.endpoint) as (listen, pid), AsyncClient(launcher.endpoint) as client:
                for number in range(rounds + 1):
                    of_gateway = await measure(lambda: _ask_gateway(listen), pid)
                    of_client = await measure(lambda: _ask_orchestrator(client), os.getpid())
                    if number:  # the first round warms up
                        by_gateway.append(of_gateway)
                        by_client.append(of_client)
                memory = await measure_memory(listen, pid)
    return figures(by_gateway, by_client, memory)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--rounds", type=int, default=9, help="Number of alternations. Default 9.")
    arguments = parser.parse_args()
    raise_open_files_limit()
    report("gateway", asyncio.run(_run(arguments.rounds)), json_file=arguments.json)


if __name__ == "__main__":
    main()
