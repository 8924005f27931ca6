"""Callers of a gateway that take a share of it, and leave the others to other callers."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from ssl import MemoryBIO, SSLWantReadError, create_default_context
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
import websockets

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway import catalog, connections, limits, service
from stagemesh.gateway.audio import Measured
from stagemesh.gateway.connections import HttpConnection
from stagemesh.gateway.limits import name_of_host
from stagemesh.gateway.routes import chat, voices
from stagemesh.rpc import call_limits
from stagemesh.rpc.channels import open_async
from tests.client.scripted import admitted, ended, finished
from tests.credentials import issue
from tests.gateway.attacks import answer_of, attacked, connected, exchange, head, json_head, post, upgrade
from tests.gateway.making import REALTIME, rejection, served_with_tokens, serving, until, watched_limits
from tests.gateway.sounds import audio_file

OTHER = "127.0.0.2"
LARGE = "x" * (7 << 20)


_ENDS = frozenset(
    {"error", "session.updated", "conversation.item.done", "conversation.item.retrieved", "response.done"}
)


async def _send(address: str, *events: dict[str, Any], ends: Collection[str] = _ENDS) -> None:
    """Sends events. Waits after each until it has failed, or its item was added. With `ends`, waits only at the end."""
    async with websockets.connect(f"ws://{address}{REALTIME}", max_size=None) as socket:
        await socket.recv()
        for event in events:
            await socket.send(json.dumps(event))
            while (ends is _ENDS or event is CLEAR) and json.loads(await socket.recv())["type"] not in ends:
                pass


def _form(*parts: bytes) -> bytes:
    """Returns a form with these names and contents in turn."""
    return b"".join(map(PART.__mod__, zip(parts[::2], parts[1::2], strict=True))) + b"--b--\r\n"


def _voice(audio: bytes) -> bytes:
    """Returns a form that creates a voice."""
    return _form(b"name", b"ada", b'audio_sample"; filename="a', audio)


ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LARGE}]}
CREATE = {"type": "conversation.item.create", "item": ITEM}
KNOWN = {**CREATE, "item": {**ITEM, "id": "known"}}
TOOL = {"type": "function", "name": "f", "parameters": {"x": [1] * 9000}}
SETTINGS = {"type": "session.update", "session": {"tools": [TOOL]}}
STREAM = json.dumps({"model": "p", "prompt": LARGE, "stream": True}).encode()
FORM_TYPE = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
COMMAS = b"," * 100_000
LONG = audio_file("flac", "flac", seconds=30, rate_hz=96_000, layout="stereo")
CLEAR = {"type": "input_audio_buffer.clear"}
REJECTED: dict[str, Callable[[str], Awaitable[Any]]] = {
    "body": lambda address: post(address, "completions", b" " * (14 << 20)),
    "form": lambda address: post(address, "audio/transcriptions", b" " * (14 << 20), FORM_TYPE),
    "values": lambda address: post(address, "completions", b'{"stop": [%b1]}' % (b"1," * 100_000)),
    "event": lambda address: _send(address, {"type": "session.update", "session": {"x": LARGE}}),
    "stream": lambda address: post(address, "completions", STREAM),
    "item": lambda address: _send(address, *[CREATE] * 5),
    "response": lambda address: _send(address, CREATE, {"type": "response.create"}),
    "large response": lambda address: _send(address, CREATE, CREATE, {"type": "response.create"}),
    "response with a wrong limit": lambda address: _send(
        address, CREATE, {"type": "response.create", "response": {"max_output_tokens": 1 << 40}}
    ),
    "values of settings": lambda address: _send(address, SETTINGS, *[{**SETTINGS, "session": {}}] * 2),
    "answer": lambda address: _send(address, KNOWN, {"type": "conversation.item.retrieve", "item_id": "known"}),
    "response before another event": lambda address: _send(
        address, {"type": "response.create", "response": {"input": [ITEM]}}, CLEAR, ends={"response.done"}
    ),
    "values of a voice": lambda address: post(address, "audio/voices", _voice(LONG), FORM_TYPE),
    "values of a form": lambda address: post(address, "audio/transcriptions", _form(b"x", COMMAS), FORM_TYPE),
}


@pytest.mark.parametrize("name", REJECTED)
async def test_a_caller_whose_large_content_is_rejected_waits_and_others_do_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "time", SimpleNamespace(monotonic=lambda: 0.0))
    async with attacked(voices=str(tmp_path)) as (orchestrator, address):
        orchestrator.scripts.append([admitted(), InvalidRequestError("no")])
        for _ in range(3 if "values" in name else 2):
            await REJECTED[name](address)
        small = json_head("/v1/completions", 2, [("X-Forwarded-For", "10.0.0.1")]) + b"{}"
        answer = await exchange(address, small)
        assert (answer.status, "rate_limit_exceeded" in answer.text) == (429, True)
        assert (await exchange(address, small, source=OTHER)).status == 400


async def test_audio_of_a_caller_leaves_threads_to_others_and_ends_with_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, go, decoded = watched_limits(monkeypatch), threading.Event(), list[bytes]()

    def measure(data: bytes, **_: Any) -> Measured:
        decoded.append(data)
        if data == b"slow":
            go.wait(30)
        return Measured("audio/wav", 2.0, 1.0)

    monkeypatch.setattr(voices, "measure", measure)
    slow, fast = (
        head("POST", "/v1/audio/voices", [("Content-Type", FORM_TYPE), ("Content-Length", str(len(form)))]) + form
        for form in (_voice(b"slow"), _voice(b"fast"))
    )
    async with attacked(voices=str(tmp_path)) as (_, address), asyncio.timeout(20):
        waiting = [asyncio.create_task(exchange(address, slow)) for _ in range(20)]
        await until(lambda: len(decoded) == 2)
        assert (await exchange(address, fast, source=OTHER)).status == 200
        await end_tasks(waiting)
        await until(lambda: not shared.memory._held)
        go.set()
    assert decoded == [b"slow", b"slow", b"fast"]


async def test_the_commas_of_a_file_are_not_values() -> None:
    async with attacked() as (_, address):
        for _ in range(3):
            await post(address, "audio/transcriptions", _form(b'x"; filename="y', COMMAS), FORM_TYPE)
        assert (await exchange(address, json_head("/v1/completions", 2) + b"{}")).status == 400


def test_the_addresses_of_a_network_are_one_host() -> None:
    assert name_of_host("2001:db8::1") == name_of_host("2001:db8:0:0:ffff::2%eth0") != name_of_host("2001:db8:0:1::1")


@asynccontextmanager
async def _unfinished(socket: websockets.ClientConnection, size: int) -> AsyncGenerator[None]:
    """Sends a part of a message, and waits until it has arrived. Raises ConnectionClosed if the connection ends."""
    sent = asyncio.Event()

    async def fragments() -> AsyncGenerator[str]:
        yield "x" * size
        sent.set()
        await asyncio.Event().wait()

    sending = asyncio.create_task(socket.send(fragments()))
    try:
        await sent.wait()
        await (await socket.ping())
        yield
    finally:
        await end_tasks([sending])


async def test_messages_and_websockets_of_one_caller_leave_space_for_others() -> None:
    async with attacked(max_body_bytes=1000, max_bodies_bytes=400_000, max_websockets=4) as (_, address):
        url = f"ws://{address}{REALTIME}"
        async with websockets.connect(url) as one, websockets.connect(url) as two:
            response, message = await rejection(url)
            assert (response.status_code, "limit of this gateway" in message) == (429, True)
            assert int(response.headers["Retry-After"]) > 0
            async with websockets.connect(url, local_addr=(OTHER, 0)) as other, _unfinished(one, 150_000):
                with pytest.raises(websockets.ConnectionClosed):
                    async with _unfinished(two, 100_000):
                        pass
                async with _unfinished(other, 100_000):
                    pass
            # The one that has ended does not count any longer.
            async with websockets.connect(url):
                pass


async def _fill(socket: websockets.ClientConnection, event: dict[str, Any]) -> int:
    """Sends an event until it is rejected, at most 20 times. Returns how often it was accepted."""
    end = {"type": "conversation.item.delete", "item_id": "none"}
    for accepted in range(20):
        for each in ({**event, "event_id": "kept"}, end):
            await socket.send(json.dumps(each))
        while (received := json.loads(await socket.recv()))["type"] != "error":
            pass
        if received["error"]["event_id"] == "kept":
            assert received["error"]["code"] == "session_too_large"
            return accepted
    return 20


TEXT = [{"type": "input_text", "text": "x" * 40_000}]


@pytest.mark.parametrize(
    "event",
    [{**CREATE, "item": {**ITEM, "content": TEXT}}, {"type": "input_audio_buffer.append", "audio": "A" * 40_000}],
    ids=["items", "audio"],
)
async def test_what_websockets_of_one_caller_keep_leaves_space_for_others(event: dict[str, Any]) -> None:
    async with attacked(max_body_bytes=1000, max_bodies_bytes=400_000) as (_, address), asyncio.timeout(20):
        url = f"ws://{address}{REALTIME}"
        async with websockets.connect(url) as one, websockets.connect(url, local_addr=(OTHER, 0)) as other:
            most = await _fill(one, event)
            assert 0 < most < 5
            async with websockets.connect(url) as two:
                assert await _fill(two, event) < most
            assert await _fill(other, event) > 0
        again = 0
        while again < most:
            async with websockets.connect(url) as one:
                again = await _fill(one, event)


async def test_an_unfinished_message_ends_its_websocket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    monkeypatch.setattr(service, "BODY_S", 0.5)
    async with attacked() as (_, address), asyncio.timeout(20):
        url = f"ws://{address}{REALTIME}"
        async with websockets.connect(url) as idle, websockets.connect(url) as slow:
            async with _unfinished(slow, 1):
                await slow.wait_closed()
            await idle.send("x")
            assert [json.loads(await idle.recv())["type"] for _ in range(2)] == ["session.created", "error"]
        # A frame that arrives at less than 640 KiB a second, within which no ping can be answered.
        frame = b"\x81\xff" + (1 << 20).to_bytes(8) + bytes(4) + b"x" * (1 << 20)
        async with connected(address) as (reader, writer):
            writer.write(upgrade(REALTIME))
            await reader.readuntil(b"session.created")
            for begin in range(0, len(frame), 1 << 15):
                writer.write(frame[begin : begin + (1 << 15)])
                await asyncio.sleep(0.05)
            await reader.readuntil(b"invalid_request_error")


EVENT_LOOPS = pytest.mark.parametrize(
    "new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@EVENT_LOOPS
def test_a_handshake_that_arrives_with_its_connection_is_answered(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    https = issue(tmp_path, "client/gateway")
    received, sent = MemoryBIO(), MemoryBIO()
    tls = create_default_context(cafile=https / "ca.crt").wrap_bio(received, sent, server_hostname="127.0.0.1")
    with suppress(SSLWantReadError):
        tls.do_handshake()

    async def check() -> None:
        async with serving("127.0.0.1:1", https=str(https)) as address, asyncio.timeout(40):
            host, _, port = address.partition(":")
            # The server accepts the connection when this task waits, and its first message is there then.
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent.read())
                connection.setblocking(False)
                while True:
                    received.write(await asyncio.get_running_loop().sock_recv(connection, 1 << 16))
                    with suppress(SSLWantReadError):
                        tls.do_handshake()
                        return

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(check())
    assert tls.cipher() is not None


@EVENT_LOOPS
def test_a_handshake_counts_and_ends_in_time(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = watched_limits(monkeypatch, max_connections=2).connections._held
    monkeypatch.setattr(connections, "_HEAD_S", 2)
    https = issue(tmp_path, "client/gateway")
    tls = create_default_context(cafile=https / "ca.crt")

    async def get(address: str, source: str = "127.0.0.1") -> int:
        transport = httpx.AsyncHTTPTransport(verify=tls, local_address=source)
        async with httpx.AsyncClient(transport=transport) as http:
            try:
                return (await http.get(f"https://{address}/health")).status_code
            except httpx.TransportError:
                return 0

    async def check() -> None:
        async with serving("127.0.0.1:1", https=str(https)) as address, asyncio.timeout(40):
            await until(lambda: not held)
            async with connected(address) as (reader, _):
                await until(lambda: held)
                assert await get(address) == 0
                assert await get(address, OTHER) == 200
                assert await reader.read() == b""
            await until(lambda: not held)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(check())


@EVENT_LOOPS
def test_data_in_place_of_a_handshake_does_not_keep_its_share(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = watched_limits(monkeypatch).connections._held
    https, start_tls = issue(tmp_path, "client/gateway"), HttpConnection._start_tls

    async def start_late(connection: HttpConnection, *arguments: Any) -> None:
        while len(connection._early) <= 1 << 18:
            await asyncio.sleep(0)
        await start_tls(connection, *arguments)

    async def check() -> None:
        async with serving("127.0.0.1:1", https=str(https)) as address, asyncio.timeout(40):
            monkeypatch.setattr(HttpConnection, "_start_tls", start_late)
            await until(lambda: not held)
            async with connected(address) as (reader, writer):
                writer.write(b"x" * (1 << 19))
                with suppress(ConnectionError):
                    await reader.read()
            await until(lambda: not held)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(check())


async def test_a_rejected_body_that_was_not_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = list[HttpConnection](), HttpConnection._begin

    def begin_noted(connection: HttpConnection, *transports: asyncio.Transport) -> None:
        begun.append(connection)
        begin(connection, *transports)

    async with serving("127.0.0.1:1") as address:
        monkeypatch.setattr(HttpConnection, "_begin", begin_noted)
        async with connected(address) as (reader, writer):
            writer.write(json_head("/v1/completions", 1 << 30) + b"x" * 1000)
            assert (await answer_of(reader)).status == 413
            assert [len(each.cycle.body) for each in begun] == [0]


async def test_connections_of_a_running_request_are_not_closed_for_another_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_MAX_CALLERS", 2)
    parsed, evicted, closed = asyncio.Event(), asyncio.Event(), list[str | None]()
    close = catalog.Catalog.close

    async def convert_later(work: Callable[[], Any], *, size_bytes: int) -> Any:
        parsed.set()
        await evicted.wait()
        return work()

    async def close_noted(each: catalog.Catalog) -> None:
        closed.append(each.caller)
        await close(each)

    monkeypatch.setattr(chat, "aside", convert_later)
    monkeypatch.setattr(catalog.Catalog, "close", close_noted)
    content = b'{"model": "p", "messages": [{"role": "user", "content": "x"}]}'
    callers = {f"token-{name}": name for name in ("ada", "bob", "cat", "dan")}
    async with served_with_tokens(tmp_path, callers) as (orchestrator, folder), asyncio.timeout(30):
        orchestrator.scripts.append([admitted(), ended(), finished()])
        async with serving(orchestrator.endpoint, tls=folder) as address:

            async def models(name: str) -> None:
                token = ("Authorization", f"Bearer token-{name}")
                assert (await exchange(address, head("GET", "/v1/models", [token]))).status == 200

            token = ("Authorization", "Bearer token-ada")
            request = json_head("/v1/chat/completions", len(content), [token]) + content
            running = asyncio.create_task(exchange(address, request))
            await parsed.wait()
            for name in ("bob", "cat"):
                await models(name)
            evicted.set()
            assert ((await running).status, closed) == (200, ["bob"])
            await models("dan")
            assert closed == ["bob", "ada"]


async def test_guessed_tokens_open_no_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()

    def open_noted(endpoint: str, *arguments: Any) -> Any:
        opened.append(endpoint)
        return open_async(endpoint, *arguments)

    monkeypatch.setattr("stagemesh.client.clients.open_async", open_noted)
    async with (
        served_with_tokens(tmp_path, {"secret": "ada"}) as (orchestrator, folder),
        serving(orchestrator.endpoint, tls=folder) as address,
    ):
        for number in range(20):
            token = ("Authorization", f"Bearer guess-{number}")
            assert (await exchange(address, head("GET", "/v1/models", [token]))).status == 401
        guessed = len(opened)
        token = ("Authorization", "Bearer secret")
        assert (await exchange(address, head("GET", "/v1/models", [token]))).status == 200
    assert guessed == 1
