"""Raw connections to a gateway, which send what no client would."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

from tests.client.scripted import ScriptedOrchestrator, served
from tests.gateway.making import describe, serving

Headers = Sequence[tuple[str, str]]
JSON_PATHS = ("chat/completions", "completions", "responses", "audio/speech", "images/generations", "videos")
FORM_PATHS = ("images/edits", "videos", "audio/transcriptions", "audio/voices")


@asynccontextmanager
async def attacked(**settings: Any) -> AsyncGenerator[tuple[ScriptedOrchestrator, str]]:
    """Yields a scripted orchestrator whose pipeline "p" has a text, and the address of its gateway.

    `settings` are settings of the gateway's config.
    """
    async with served() as orchestrator, serving(orchestrator.endpoint, **settings) as address:
        describe(orchestrator, "text")
        yield orchestrator, address


async def post(address: str, path: str, content: bytes, kind: str = "application/json", **headers: str) -> Any:
    """Sends a body to a path of the API. Returns the response."""
    async with httpx.AsyncClient(timeout=30) as http:
        headers = {"content-type": kind, **headers}
        return await http.post(f"http://{address}/v1/{path}", content=content, headers=headers)


class Answer(NamedTuple):
    """The status of a response, and all of its text. The status is 0 if there was no response."""

    status: int
    text: str


def head(method: str, path: str, headers: Headers = (), *, host: str | None = "localhost") -> bytes:
    """Returns the head of a request. `host` None means none."""
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in ((("Host", host),) if host is not None else ())]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers), "", ""]).encode()


def json_head(path: str, length: int, headers: Headers = (), *, host: str = "localhost") -> bytes:
    """Returns the head of a request with a JSON body."""
    described = [("Content-Type", "application/json"), ("Content-Length", str(length))]
    return head("POST", path, [*described, *headers], host=host)


def upgrade(path: str, headers: Headers = (), *, host: str = "localhost") -> bytes:
    """Returns the head of a request for a WebSocket."""
    key = ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
    parts = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13"), key]
    return head("GET", path, [*parts, *headers], host=host)


async def exchange(address: str, *parts: bytes, source: str | None = None) -> Answer:
    """Sends bytes over a new connection, and returns the first response. The sender stops before the end."""
    async with connected(address, source=source) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await answer_of(reader)


@asynccontextmanager
async def connected(
    address: str, *, source: str | None = None
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yields a connection to the address, from the host `source`."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0) if source else None)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_of(reader: asyncio.StreamReader) -> Answer:
    """Reads one response with a Content-Length."""
    async with asyncio.timeout(15):
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lengths = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
            return Answer(int(lines[0].split(" ")[1]), (await reader.readexactly(int(lengths[0]))).decode())
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(0, "")


@asynccontextmanager
async def longest_block_s() -> AsyncGenerator[list[float]]:
    """Measures for how long the event loop did no other work within the block. Yields the list with the result."""
    loop, blocks = asyncio.get_running_loop(), [0.0]

    async def tick() -> None:
        while True:
            began_s = loop.time()
            await asyncio.sleep(0.005)
            blocks[0] = max(blocks[0], loop.time() - began_s - 0.005)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    yield blocks
    ticking.cancel()
