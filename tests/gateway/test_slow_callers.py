"""Callers that send slowly, send without end, do not read or open many connections."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from ssl import create_default_context
from typing import Any

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway import connections, limits, service
from tests.client.scripted import Pause, admitted, audio, ended, finished, text
from tests.credentials import issue
from tests.gateway.attacks import attacked, connected, exchange, head, json_head, longest_block_s, upgrade
from tests.gateway.making import REALTIME, describe, until, watched_limits

CHUNKED = head("POST", "/v1/completions", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])


HALF_REQUESTS: Mapping[str, tuple[bytes, ...]] = {
    "nothing": (b"",),
    "half a line": (b"POST /v1/chat",),
    "half the headers": (head("POST", "/v1/completions")[:-2],),
    "line ends": (b"\r\n" * 10,),
    "half a second request": (head("GET", "/health"), b"GET / HT"),
    "line ends after a request": (head("GET", "/health"), b"\r\n\r\n"),
    "half a body": (json_head("/v1/completions", 1000), b"{"),
    "half a chunk": (CHUNKED, b"ff\r\n{"),
    "a WebSocket whose headers its parser rejects": (upgrade(REALTIME, [("X-Long", "y" * 9000)]),),
    "a WebSocket with a body": (upgrade(REALTIME, [("Content-Length", "5")]),),
    "a body that is not read": (head("GET", "/health", [("Content-Length", "1000")]), b"x"),
}


@pytest.mark.parametrize("name", HALF_REQUESTS)
async def test_half_requests_end_and_others_are_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.4)
    monkeypatch.setattr(limits, "BODY_S", 0.4)
    async with attacked(keep_alive_s=1) as (_, address):

        async def stall() -> None:
            async with connected(address) as (reader, writer):
                for part in HALF_REQUESTS[name]:
                    writer.write(part)
                with suppress(ConnectionError):
                    await reader.read(-1)

        async with asyncio.timeout(20):
            stalls = [asyncio.create_task(stall()) for _ in range(200)]
            assert (await exchange(address, head("GET", "/v1/models"))).status == 200
            await asyncio.gather(*stalls)


ENDLESS: Mapping[str, tuple[bytes, bytes]] = {
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n"),
    "one header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"yyyyyyyyyy"),
    "the URL": (b"GET /", b"yyyyyyyyyy"),
    "line ends": (b"", b"\r\n"),
    "requests": (b"", head("GET", "/health")),
    "small chunks": (CHUNKED, b"1\r\n \r\n"),
    "an extension of a chunk": (CHUNKED + b"1;", b"yyyyyyyyyy"),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X: y\r\n"),
    "a trailer": (CHUNKED + b"1\r\n{\r\n0\r\nX: ", b"yyyyyyyyyy"),
}
FRAMES = {"texts": 0x81, "bytes": 0x82, "pings": 0x89, "pongs": 0x8A, "fragments": 0x00}
"""The first byte of each empty frame that is sent without end."""


async def _check_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endless: bytes) -> None:
    """Asserts that the connection ends, and that the gateway serves others meanwhile."""
    async with longest_block_s() as blocks, asyncio.timeout(20):
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(endless * 10_000)
                await writer.drain()
    assert blocks[0] < 1


@pytest.mark.parametrize("name", ENDLESS)
async def test_endless_requests_end_the_connection(name: str) -> None:
    begin, endless = ENDLESS[name]
    async with attacked() as (_, address), connected(address) as (reader, writer):
        writer.write(begin)
        await _check_end(reader, writer, endless)


@pytest.mark.parametrize("name", FRAMES)
async def test_endless_frames_end_the_websocket(name: str) -> None:
    async with attacked() as (_, address), connected(address) as (reader, writer):
        writer.write(upgrade(REALTIME) + bytes([0x01, 0x80, 0, 0, 0, 0]) * (name == "fragments"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        await _check_end(reader, writer, bytes([FRAMES[name], 0x80, 0, 0, 0, 0]))


@pytest.mark.parametrize("streams", [True, False])
async def test_a_caller_that_does_not_read_loses_its_connection(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_STALLED_S", 0.4)
    monkeypatch.setattr(connections, "_HEAD_S", 0.4)
    async with attacked() as (orchestrator, address):
        orchestrator.scripts.append([admitted(), *[text("x" * (4 << 20))] * 8, ended(), finished()])
        content = json.dumps({"model": "p", "prompt": "x", "stream": streams}).encode()
        async with connected(address) as (_, writer), asyncio.timeout(30):
            assert isinstance(writer.transport, asyncio.Transport)
            writer.transport.pause_reading()
            writer.write(json_head("/v1/completions", len(content)) + content)
            # The server's end: this host has no more connections to the gateway.
            port = int(address.rpartition(":")[2])
            await until(lambda: port in _ports(established=True))
            await until(lambda: port not in _ports(established=True))


@pytest.mark.parametrize("tls", [False, True])
async def test_a_caller_that_reads_slowly_receives_its_whole_answer(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, end_after = asyncio.Semaphore(0), connections._LimitedConnection.end_after

    def noted(connection: Any, seconds: float | None) -> None:
        if seconds and connection.transport.get_write_buffer_size():
            waits.release()
        end_after(connection, seconds)

    monkeypatch.setattr(connections, "_STALLED_S", 0.4)
    monkeypatch.setattr(connections, "_HEAD_S", 0.4)
    monkeypatch.setattr(connections._LimitedConnection, "end_after", noted)
    https = issue(tmp_path, "client/gateway") if tls else None
    context = None if https is None else create_default_context(cafile=https / "ca.crt")
    content = json.dumps({"model": "p", "prompt": "x"}).encode()
    async with attacked(https=https and str(https)) as (orchestrator, address), asyncio.timeout(30):
        orchestrator.scripts.append([admitted(), *[text("x" * (4 << 20))] * 8, ended(), finished()])
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]), ssl=context)
        writer.write(json_head("/v1/completions", len(content)) + content)
        # The peer reads a part of the answer each time that the gateway begins to wait for it.
        answer = b""
        for _ in range(4):
            await waits.acquire()
            answer += await reader.readexactly(4 << 20)
        answer += await reader.readexactly(16 << 20)
        writer.close()
    assert answer.count(b"x") > 31 << 20


_EVENT = json.dumps({"type": "response.create", "response": {"instructions": "x"}}).encode()
_EVENT = bytes([0x81, 0x80 | len(_EVENT), 0, 0, 0, 0]) + _EVENT
_SPEECH = json.dumps({"model": "p", "input": "x", "response_format": "pcm"}).encode()
UNREAD: Mapping[str, tuple[bytes, bytes | None]] = {
    "a WebSocket that answers no ping": (_EVENT, b""),
    "a WebSocket that the peer closes": (_EVENT, bytes([0x88, 0x82, 0, 0, 0, 0, 0x03, 0xE8])),
    "a WebSocket that the peer shuts down": (_EVENT, None),
    "a stream that is broken off": (json_head("/v1/audio/speech", len(_SPEECH)) + _SPEECH, b""),
}
"""The first bytes of a peer that does not read, and its bytes when the server waits for it. None for the end."""


@pytest.mark.parametrize("name", UNREAD)
async def test_a_closed_connection_leaves_its_shares_although_its_peer_does_not_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, paused = watched_limits(monkeypatch), asyncio.Event()
    monkeypatch.setattr(service, "BODY_S", 1.5 if "ping" in name else 20)
    monkeypatch.setattr(connections, "_HEAD_S", 0.4)
    end_after = connections.WebSocketConnection.end_after

    def noted(connection: Any, seconds: float | None) -> None:
        if seconds == connections._STALLED_S:
            paused.set()
        end_after(connection, seconds)

    monkeypatch.setattr(connections._LimitedConnection, "end_after", noted)
    first, then = UNREAD[name]
    async with attacked() as (orchestrator, address), connected(address) as (reader, writer), asyncio.timeout(20):
        describe(orchestrator, "text", "audio")
        sound = audio([0.5] * 1_000_000, sample_rate_hz=8000)
        answer = [sound, InvalidRequestError("x")] if first[:4] == b"POST" else [text("x" * (4 << 20))] * 3
        orchestrator.scripts.append([admitted(), *answer, Pause.FOREVER])
        if first is _EVENT:
            writer.write(upgrade(REALTIME))
            await reader.readuntil(b"session.created")
        assert isinstance(writer.transport, asyncio.Transport)
        writer.transport.pause_reading()
        writer.write(first)
        await paused.wait()
        assert shared.connections._held
        writer.write_eof() if then is None else writer.write(then)
        await until(lambda: not shared.connections._held and not shared.websockets._held)


def _ports(*, established: bool) -> set[int]:
    """Returns the local ports of the established connections of this host."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if (line[3] == "01") == established}


@pytest.mark.parametrize("second", [head("GET", "/health"), upgrade(REALTIME)], ids=["request", "upgrade"])
async def test_a_request_before_the_end_of_the_last_answer_ends_the_connection(second: bytes) -> None:
    async with attacked() as (orchestrator, address), asyncio.timeout(30):
        orchestrator.scripts.append([admitted(), text("x"), Pause.FOREVER])
        content = json.dumps({"model": "p", "prompt": "x", "stream": True}).encode()
        async with connected(address) as (reader, writer):
            writer.write(json_head("/v1/completions", len(content)) + content)
            await reader.readuntil(b"data: ")
            writer.write(second)
            assert b"data: [DONE]" not in await reader.read()
        await orchestrator.hung_up.wait()


async def test_further_connections_are_closed() -> None:
    async with attacked(max_connections=6) as (_, address), connected(address), connected(address):
        assert (await exchange(address, head("GET", "/health"))).status == 200
        async with connected(address):
            assert (await exchange(address, head("GET", "/health"))).status == 0
        while not (await exchange(address, head("GET", "/health"))).status:
            await asyncio.sleep(0.02)


async def test_bodies_of_one_caller_leave_space_for_others() -> None:
    async with attacked(max_body_bytes=1000, max_bodies_bytes=4000) as (orchestrator, address):
        orchestrator.scripts.append([admitted(), ended(), finished()])
        content = json.dumps({"model": "p", "prompt": "x" * 800}).encode()
        whole = json_head("/v1/completions", len(content)) + content
        async with connected(address) as one, connected(address) as two, connected(address) as three:
            for _, writer in (one, two, three):
                writer.write(json_head("/v1/completions", 1000) + b"{" * 650)
            answer = await exchange(address, whole)
            while answer.status == 200:
                answer = await exchange(address, whole)
            assert answer.status == 429
            assert "rate_limit_exceeded" in answer.text
            assert (await exchange(address, whole, source="127.0.0.2")).status == 200
        while (await exchange(address, whole)).status == 429:
            await asyncio.sleep(0.02)
