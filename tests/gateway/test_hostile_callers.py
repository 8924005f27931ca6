"""Callers that attack a gateway: without a token, with huge or malformed content, slowly, or by foreign web pages."""

import asyncio
import json
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.common.process.config import load_config
from stagemesh.gateway import body, connections
from stagemesh.gateway.body import decode_json
from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.realtime import items
from stagemesh.gateway.realtime.connection import CLIENT_EVENT
from stagemesh.gateway.realtime.items import Conversation, FunctionCallItem, UserMessage
from stagemesh.gateway.realtime.settings import Settings
from stagemesh.gateway.routes.chat import ChatBody
from stagemesh.gateway.routes.completions import CompletionBody
from stagemesh.gateway.routes.images import ImageBody
from stagemesh.gateway.routes.speech import SpeechBody
from stagemesh.gateway.routes.transcriptions import TranscriptionBody
from stagemesh.gateway.routes.videos import VideoBody
from stagemesh.gateway.routes.voices import CreateVoiceBody
from tests.client.scripted import admitted, ended, finished, served, text
from tests.credentials import process_credentials
from tests.gateway.attacks import answer_of, connected, exchange, head, json_head, longest_block_s
from tests.gateway.making import describe, error_of, known_callers, serving
from tests.rpc.call_errors import raises

BODIES = (ChatBody, CompletionBody, ImageBody, SpeechBody, TranscriptionBody, VideoBody, CreateVoiceBody, Settings)
JSON_PATHS = ("chat/completions", "completions", "audio/speech", "images/generations", "videos")
FORM_PATHS = ("images/edits", "videos", "audio/transcriptions", "audio/voices")
USER = {"role": "user", "content": "hi"}
MANY = 5_000


async def _post(address: str, path: str, content: bytes, kind: str = "application/json", **headers: str) -> Any:
    async with httpx.AsyncClient(timeout=30) as http:
        headers = {"content-type": kind, **headers}
        return await http.post(f"http://{address}/v1/{path}", content=content, headers=headers)


# -- huge content


def _arrays(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            yield schema
        for value in schema.values():
            yield from _arrays(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _arrays(value)


def test_every_list_of_every_body_and_event_has_a_maximum() -> None:
    schemas = [*(each.model_json_schema() for each in BODIES), CLIENT_EVENT.json_schema()]
    found = [array for schema in schemas for array in _arrays(schema)]
    assert len(found) > 20
    assert all(1 <= array["maxItems"] <= body.MAX_TOKEN_IDS for array in found), found


WRONG_LISTS: Mapping[str, tuple[str, Any]] = {
    "messages": ("chat/completions", lambda wrong: {"messages": wrong}),
    "parts": ("chat/completions", lambda wrong: {"messages": [{"role": "user", "content": wrong}]}),
    "calls": ("chat/completions", lambda wrong: {"messages": [{"role": "assistant", "tool_calls": wrong}]}),
    "annotations": ("chat/completions", lambda wrong: {"messages": [{**USER, "annotations": wrong}]}),
    "tools": ("chat/completions", lambda wrong: {"messages": [USER], "tools": wrong}),
    "modalities": ("chat/completions", lambda wrong: {"messages": [USER], "modalities": wrong}),
    "choice": ("chat/completions", lambda wrong: {"messages": [USER], "structured_outputs": {"choice": wrong}}),
    "stop": ("completions", lambda wrong: {"prompt": "x", "stop": wrong}),
    "stop tokens": ("completions", lambda wrong: {"prompt": "x", "stop_token_ids": wrong}),
    "bad words": ("completions", lambda wrong: {"prompt": "x", "bad_words": wrong}),
    "prompt": ("completions", lambda wrong: {"prompt": wrong}),
    "keys": ("completions", lambda wrong: {"prompt": "x", **{f"k{n}": 1 for n, _ in enumerate(wrong)}}),
    "options": (
        "images/generations",
        lambda wrong: {"prompt": "x", "options": {f"k{n}": [] for n, _ in enumerate(wrong)}},
    ),
    "stages": ("videos", lambda wrong: {"prompt": "x", "stages": {f"k{n}": 1 for n, _ in enumerate(wrong)}}),
    "voice": ("audio/speech", lambda wrong: {"input": "x", "voice": {f"k{n}": 1 for n, _ in enumerate(wrong)}}),
    "long names": (
        "videos",
        lambda wrong: {"prompt": "x", **{"k" * 9_000 + str(n): 1 for n, _ in enumerate(wrong[:90])}},
    ),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
@pytest.mark.parametrize("wrong", [{"x": 1}, [], None], ids=["objects", "lists", "nulls"])
async def test_a_list_of_wrong_entries_has_a_short_answer_without_them(name: str, wrong: object) -> None:
    path, make = WRONG_LISTS[name]
    if name == "annotations" and wrong is None:
        wrong = "x"
    content = json.dumps({"model": "p", **make([wrong] * MANY)}).encode()
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        answer = await _post(address, path, content)
        message = error_of(answer)["message"]
        assert len(message) <= 4_200
        assert message.count(";") < 20
        assert not orchestrator.requests


@pytest.mark.parametrize("element", [b"{},", b"[],", b'"",', b"1,", b'{"a":', b'\\"{},'])
@pytest.mark.parametrize("path", [*JSON_PATHS, "realtime"])
async def test_a_body_of_tiny_values_takes_little_memory_and_time(path: str, element: bytes) -> None:
    content = b'{"model":"p","type":"response.create","messages":[' + element * (4_000_000 // len(element)) + b"1]}"
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        tracemalloc.start()
        try:
            async with longest_block_s() as blocks:
                if path == "realtime":
                    async with websockets.connect(f"ws://{address}/v1/realtime?model=p") as socket:
                        await socket.recv()
                        await socket.send(content.decode())
                        error = json.loads(await socket.recv())["error"]
                else:
                    error = (await _post(address, path, content)).json()["error"]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert error["code"] in {"message_too_large", "invalid_request"}
        assert len(error["message"]) < 4_200
        assert peak < 100 << 20
        assert blocks[0] < 1


@given(
    st.recursive(
        st.none() | st.integers(0, 9) | st.text('"\\,[{é', max_size=9),
        lambda each: st.lists(each) | st.dictionaries(st.text('\\",{', max_size=4), each),
    )
)
def test_values_in_texts_do_not_count(value: object) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_COUNTED_BYTES", 5)
        patch.setattr(body, "_MAX_OBJECTS", _objects(value))
        assert decode_json(text) == value
        if _objects(value):
            patch.setattr(body, "_MAX_OBJECTS", _objects(value) - 1)
            with raises(InvalidRequestError, reason="MESSAGE_TOO_LARGE"):
                decode_json(text)


def _objects(value: object) -> int:
    """Returns the number of texts, lists and objects in a JSON value."""
    if isinstance(value, dict):
        return 1 + sum(1 + _objects(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(map(_objects, value))
    return int(isinstance(value, str))


async def test_texts_with_many_commas_are_no_attack() -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        orchestrator.scripts.append([admitted(), ended(), finished()])
        content = json.dumps({"model": "p", "prompt": 'a,[{"\\' * 500_000}).encode()
        assert (await _post(address, "completions", content)).status_code == 200


BOUNDARY = b"--b\r\nContent-Disposition: form-data; name="
FORMS = {
    "many fields": (BOUNDARY + b'"x"\r\n\r\n\r\n') * 100_000,
    "many files": (BOUNDARY + b'"file"; filename="a"\r\n\r\n\r\n') * 100_000,
    "a long head": BOUNDARY + b'"x"\r\nX: ' + b"x" * 4_000_000 + b"\r\n\r\n\r\n",
    "many headers": BOUNDARY + b'"x"\r\n' + b"X: y\r\n" * 500_000 + b"\r\n\r\n",
    "line ends": BOUNDARY + b'"file"; filename="a"\r\n\r\n' + b"\r\n" * 2_000_000 + b"\r\n",
    "a preamble": b"--\r\n-\r\n" * 500_000,
    "a large field": BOUNDARY + b'"prompt"\r\n\r\n' + b"x" * 3_000_000 + b"\r\n",
    "JSON in a field": BOUNDARY + b'"options"\r\n\r\n' + b"[" + b"{}," * 300_000 + b"1]\r\n",
    "no name": b"--b\r\n\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("path", FORM_PATHS)
async def test_a_malformed_form_is_rejected_at_once(path: str, name: str, tmp_path: Path) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint, voices=str(tmp_path)) as address:
        describe(orchestrator, "text")
        async with longest_block_s() as blocks:
            answer = await _post(address, path, FORMS[name] + b"--b--\r\n", "multipart/form-data; boundary=b")
        assert len(error_of(answer)["message"]) < 4_200
        assert blocks[0] < 1


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
@pytest.mark.parametrize("path", [*JSON_PATHS, *FORM_PATHS])
async def test_a_content_type_that_any_page_can_send_is_not_json(path: str, kind: str, tmp_path: Path) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint, voices=str(tmp_path)) as address:
        describe(orchestrator, "text")
        error_of(await _post(address, path, json.dumps({"model": "p", "prompt": "x", "input": "x"}).encode(), kind))
        assert not orchestrator.requests


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x00" * 100, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", b""])
async def test_what_is_not_json_is_an_error_of_the_caller(content: bytes) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        assert (await _post(address, "completions", content, **{"content-encoding": "gzip"})).status_code in {400, 413}


async def test_deep_values_are_an_error_of_the_caller() -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        orchestrator.scripts.append([admitted(), ended(), finished()])
        for depth in (100, 500, 900, 980):
            deep = b'{"a":' * depth + b"1" + b"}" * depth
            for field in (b"chat_template_kwargs", b"stages", b"options"):
                content = b'{"model":"p","messages":[{"role":"user","content":"x"}],"%b":%b}' % (field, deep)
                assert (await _post(address, "chat/completions", content)).status_code < 500, (depth, field)


@pytest.mark.parametrize("kind", ["session.update", "response.cancel", "conversation.item.delete"])
async def test_events_without_media_have_at_most_a_mebibyte(kind: str) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        async with websockets.connect(f"ws://{address}/v1/realtime?model=p", max_size=None) as socket:
            assert socket.response is not None
            assert "permessage-deflate" not in socket.response.headers.get("sec-websocket-extensions", "")
            await socket.recv()
            event = {"type": kind, "session": {"instructions": "x" * (2 << 20)}, "item_id": "x" * (2 << 20)}
            await socket.send(json.dumps(event))
            assert json.loads(await socket.recv())["error"]["code"] == "message_too_large"
            text_part = {"type": "input_text", "text": "x" * (2 << 20)}
            item = {"type": "message", "role": "user", "content": [text_part]}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            assert json.loads(await socket.recv())["type"] == "conversation.item.added"


async def test_a_message_of_endless_fragments_ends_the_websocket() -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        async with websockets.connect(f"ws://{address}/v1/realtime?model=p") as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await socket.send([""] * 100_000)
                while True:
                    await socket.recv()


def _upgrade(*headers: tuple[str, str]) -> bytes:
    key = ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
    upgrade = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13"), key]
    return head("GET", "/v1/realtime?model=p", [*upgrade, *headers])


@pytest.mark.parametrize("opcode", [1, 2, 9, 10], ids=["texts", "bytes", "pings", "pongs"])
async def test_endless_frames_end_the_websocket_and_do_not_stop_others(opcode: int) -> None:
    empty = bytes([0x80 | opcode, 0x80, 0, 0, 0, 0])
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        async with connected(address) as (reader, writer), longest_block_s() as blocks, asyncio.timeout(20):
            writer.write(_upgrade())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            with suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(empty * 10_000)
                    await writer.drain()
        assert blocks[0] < 1


async def test_a_response_refers_to_an_item_once() -> None:
    item = {"type": "message", "role": "user", "id": "a", "content": [{"type": "input_text", "text": "hi"}]}
    twice = [{"type": "item_reference", "id": "a"}] * 2
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        async with websockets.connect(f"ws://{address}/v1/realtime?model=p") as socket:
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await socket.send(json.dumps({"type": "response.create", "response": {"input": twice}}))
            while (event := json.loads(await socket.recv()))["type"] != "error":
                pass
        assert "twice" in event["error"]["message"]
        assert not orchestrator.requests


@pytest.mark.parametrize("number", ["1.7777777777777777e-322", "1E+100", f"0.{'1' * 30}", "1" * 30])
def test_numbers_that_take_long_are_rejected(number: str) -> None:
    with raises(InvalidRequestError, reason="INVALID_REQUEST", match="number"):
        decode_json(f"[1, {number}]".encode())


def test_numbers_of_programs_are_accepted() -> None:
    values = [0.1, -1e-99, 1.7976931348623157e98, (1 << 63) - 1, -0.1234567890123456]
    assert decode_json(json.dumps([*values, "1e-322", "1" * 30]).encode()) == [*values, "1e-322", "1" * 30]


# -- before the token


async def test_nothing_is_read_before_the_token_is_accepted(tmp_path: Path) -> None:
    with known_callers(tmp_path, {"secret": "ada"}) as (checker, clients):
        async with served(tokens=checker) as orchestrator:
            describe(orchestrator, "text")
            with process_credentials(None):
                async with serving(orchestrator.endpoint, tls=clients, voices=str(tmp_path / "v")) as address:
                    for token in ("", "wrong"):
                        headers = [("Authorization", f"Bearer {token}")] if token else []
                        for path in JSON_PATHS:
                            # The body never arrives.
                            answer = await exchange(address, json_head(f"/v1/{path}", 1000, headers))
                            assert answer.status == 401, (path, token, answer)
                        form = [("Content-Type", "multipart/form-data; boundary=b"), ("Transfer-Encoding", "chunked")]
                        for path in FORM_PATHS:
                            answer = await exchange(address, head("POST", f"/v1/{path}", [*form, *headers]))
                            assert answer.status == 401, (path, token)
                        for path in ("/v1/models", "/v1/videos", "/v1/none", "/metrics", "/openapi.json", "/docs"):
                            assert (await exchange(address, head("GET", path, headers))).status == 401, path
                        for path in ("realtime", "audio/speech/stream"):
                            with pytest.raises(websockets.InvalidStatus, match="401"):
                                await websockets.connect(f"ws://{address}/v1/{path}", additional_headers=headers)
                    for path in ("/", "/health", "/assets/main.js"):
                        assert (await exchange(address, head("GET", path))).status == 200, path
                    accepted = [("Authorization", "Bearer secret")]
                    assert (await exchange(address, head("GET", "/v1/models", accepted, host="any.name"))).status == 200


# -- slow callers and many of them


HALF_REQUESTS: Mapping[str, tuple[bytes, ...]] = {
    "nothing": (b"",),
    "half a line": (b"POST /v1/chat",),
    "half the headers": (head("POST", "/v1/completions")[:-2],),
    "line ends": (b"\r\n" * 10,),
    "half a second request": (head("GET", "/health"), b"GET / HT"),
    "line ends after a request": (head("GET", "/health"), b"\r\n\r\n"),
    "half a body": (json_head("/v1/completions", 1000), b"{"),
    "half a chunk": (
        head("POST", "/v1/completions", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]),
        b"ff\r\n{",
    ),
    "a WebSocket whose headers its parser rejects": (_upgrade(("X-Long", "y" * 9000)),),
    "a WebSocket with a body": (_upgrade(("Content-Length", "5")),),
    "a body that is not read": (head("GET", "/health", [("Content-Length", "1000")]), b"x"),
}


@pytest.mark.parametrize("name", HALF_REQUESTS)
async def test_half_requests_end_and_others_are_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.4)
    monkeypatch.setattr(body, "_BODY_S", 0.4)
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")

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


ENDLESS_HEADS: Mapping[str, tuple[bytes, bytes]] = {
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n"),
    "one header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"yyyyyyyyyy"),
    "the URL": (b"GET /", b"yyyyyyyyyy"),
    "line ends": (b"", b"\r\n"),
    "requests": (b"", head("GET", "/health")),
    "small chunks": (
        head("POST", "/v1/completions", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]),
        b"1\r\n \r\n",
    ),
    "an extension of a chunk": (
        head("POST", "/v1/completions", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])
        + b"1;",
        b"yyyyyyyyyy",
    ),
    "trailers": (
        head("POST", "/v1/completions", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])
        + b"1\r\n{\r\n0\r\n",
        b"X: y\r\n",
    ),
    "a trailer": (
        head("POST", "/v1/completions", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])
        + b"1\r\n{\r\n0\r\nX: ",
        b"yyyyyyyyyy",
    ),
}


@pytest.mark.parametrize("name", ENDLESS_HEADS)
async def test_endless_headers_end_the_connection(name: str) -> None:
    begin, again = ENDLESS_HEADS[name]
    async with (
        served() as orchestrator,
        serving(orchestrator.endpoint) as address,
        connected(address) as (reader, writer),
        asyncio.timeout(10),
    ):
        writer.write(begin)
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(again * 10_000)
                await writer.drain()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_caller_that_does_not_read_loses_its_connection(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_STALLED_S", 0.4)
    monkeypatch.setattr(connections, "_HEAD_S", 0.4)
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        describe(orchestrator, "text")
        orchestrator.scripts.append([admitted(), *[text("x" * (4 << 20))] * 8, ended(), finished()])
        content = json.dumps({"model": "p", "prompt": "x", "stream": streams}).encode()
        async with connected(address) as (_, writer), asyncio.timeout(30):
            assert isinstance(writer.transport, asyncio.Transport)
            writer.transport.pause_reading()
            writer.write(json_head("/v1/completions", len(content)) + content)
            # The server's end: this host has no more connections to the gateway.
            port = int(address.rpartition(":")[2])
            await _until(lambda: port in _ports(established=True))
            await _until(lambda: port not in _ports(established=True))


def _ports(*, established: bool) -> set[int]:
    """Returns the local ports of the established connections of this host."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if (line[3] == "01") == established}


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_further_connections_are_closed() -> None:
    async with (
        served() as orchestrator,
        serving(orchestrator.endpoint, max_connections=3) as address,
        connected(address) as one,
        connected(address) as two,
    ):
        for reader, writer in (one, two):
            writer.write(head("GET", "/health"))
            assert (await answer_of(reader)).status == 200
        async with connected(address) as three:
            three[1].write(head("GET", "/health"))
            assert (await answer_of(three[0])).status == 200
            assert (await exchange(address, head("GET", "/health"))).status == 0
        while not (await exchange(address, head("GET", "/health"))).status:
            await asyncio.sleep(0.02)


async def test_bodies_of_one_caller_leave_space_for_others() -> None:
    async with (
        served() as orchestrator,
        serving(orchestrator.endpoint, max_body_bytes=1000, max_bodies_bytes=4000) as address,
    ):
        describe(orchestrator, "text")
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
            assert "call_limit" in answer.text
            assert (await exchange(address, whole, source="127.0.0.2")).status == 200
        while (await exchange(address, whole)).status == 429:
            await asyncio.sleep(0.02)


# -- hosts and web pages


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[
            (host, 200)
            for host in (
                "localhost",
                "LocalHost.",
                "127.0.0.1:9",
                "[::1]:8000",
                "[0:0::1]",
                "ai.example",
                "AI.example.:443",
            )
        ],
        *[
            (host, 403)
            for host in (
                "evil.example",
                "127.0.0.1.evil.example",
                "localhost@evil.example",
                "[::1",
                "192.168.0.1",
                "",
                "localhost:x",
                "2130706433",
            )
        ],
        (None, 403),
    ],
)
async def test_a_request_for_another_host_is_rejected(host: str | None, status: int) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint, hosts=["Ai.Example."]) as address:
        for path in ("/v1/models", "/", "/health"):
            assert (await exchange(address, head("GET", path, host=host))).status == status, path
        # Two hosts are none.
        assert (await exchange(address, head("GET", "/", [("Host", "localhost")], host=host or ""))).status in {
            400,
            403,
        }


async def test_a_gateway_that_listens_everywhere_accepts_addresses_and_no_names() -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint, everywhere=True) as address:
        for host, status in (("10.0.0.7:8000", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            assert (await exchange(address, head("GET", "/v1/models", host=host))).status == status


FOREIGN: Mapping[str, list[tuple[str, str]]] = {
    "origin": [("Origin", "https://evil.example")],
    "no origin": [("Origin", "null")],
    "port": [("Origin", "http://localhost:3000")],
    "user": [("Origin", "http://localhost@evil.example")],
    "second": [("Origin", "http://localhost"), ("Origin", "https://evil.example")],
    "bad address": [("Origin", "http://[::1")],
    "site": [("Sec-Fetch-Site", "cross-site")],
    "neighbour": [("Sec-Fetch-Site", "same-site")],
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_page_changes_nothing(name: str, tmp_path: Path) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint, voices=str(tmp_path)) as address:
        describe(orchestrator, "text")
        for path in (*JSON_PATHS, *FORM_PATHS):
            assert (await exchange(address, json_head(f"/v1/{path}", 1000, FOREIGN[name]))).status == 403, path
        assert (await exchange(address, head("DELETE", "/v1/videos/x", FOREIGN[name]))).status == 403
        upgrade = [("Upgrade", "websocket"), ("Connection", "upgrade"), ("Sec-WebSocket-Version", "13")]
        upgrade += [("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")]
        for path in ("realtime?model=p", "audio/speech/stream?model=p"):
            # The server itself answers 400 to several origins.
            assert (await exchange(address, head("GET", f"/v1/{path}", [*upgrade, *FOREIGN[name]]))).status in {
                400,
                403,
            }, path
        rebound = [*upgrade, ("Origin", "http://evil.example")]
        assert (
            await exchange(address, head("GET", "/v1/realtime?model=p", rebound, host="evil.example"))
        ).status == 403


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://ai.example", "HTTP://AI.EXAMPLE."])
async def test_the_own_page_may_change_things(origin: str) -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint, hosts=["ai.example"]) as address:
        describe(orchestrator, "text")
        orchestrator.scripts.append([admitted(), ended(), finished()])
        content = b'{"model": "p", "prompt": "x"}'
        headers = [("Origin", origin), ("Sec-Fetch-Site", "same-origin"), ("Content-Type", "application/json")]
        request = head(
            "POST", "/v1/completions", [*headers, ("Content-Length", str(len(content)))], host="localhost:8000"
        )
        assert (await exchange(address, request + content)).status == 200


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [""],
        ["https://ai.example"],
        ["ai.example:443"],
        ["*"],
        ["*.example"],
        ["a b"],
        ["a/b"],
        ["::1"],
        [None],
        "ai",
    ],
)
def test_a_malformed_list_of_hosts_is_an_error_at_the_start(hosts: object, tmp_path: Path) -> None:
    config = {"listen": "127.0.0.1:0", "servers": [["127.0.0.1:1"]], "hosts": hosts}
    (tmp_path / "gateway.json").write_text(json.dumps(config))
    with raises(InvalidRequestError, reason="INVALID_CONFIG", match="hosts"):
        load_config(GatewayConfig, tmp_path / "gateway.json")


async def test_metrics_and_the_schema_are_not_at_the_port_of_callers() -> None:
    async with served() as orchestrator, serving(orchestrator.endpoint) as address:
        for path in ("/metrics", "/openapi.json", "/docs", "/redoc"):
            assert (await exchange(address, head("GET", path))).status == 404


# -- realtime items


def _message(**fields: Any) -> UserMessage:
    part = {"type": "input_text", "text": fields.pop("text", "x")}
    return UserMessage.model_validate({"role": "user", "content": [part] * fields.pop("parts", 1), **fields})


@pytest.mark.parametrize(
    "make",
    [
        _message,
        lambda: _message(parts=20),
        lambda: _message(text="\u4e2d" * 1000),
        lambda: FunctionCallItem(name="f", arguments="{}", call_id="c" * 5_000),
        lambda: UserMessage.model_validate(
            {"role": "user", "content": [{"type": "input_audio", "audio": "", "transcript": "x" * 5_000}]}
        ),
    ],
)
def test_items_count_at_least_their_memory(make: Any) -> None:
    conversation = Conversation()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(300):
            # Copies of texts as a message from a caller would have them.
            conversation.insert(CLIENT_EVENT.validate_python(_created(make())).item)  # type: ignore[union-attr]
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used <= conversation._size_bytes


def _created(item: Any) -> Any:
    return json.loads(json.dumps({"type": "conversation.item.create", "item": item.model_dump(exclude_none=True)}))


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "delete"]), st.integers(0, 9), st.sampled_from(["", "root", *"abcdefgh"]))
    )
)
def test_a_conversation_has_the_order_of_its_insertions(steps: list[tuple[str, int, str]]) -> None:
    conversation, order = Conversation(), list[str]()
    for action, number, previous in steps:
        item_id = "abcdefghij"[number]
        if action == "delete":
            if item_id in order:
                conversation.delete(item_id)
                order.remove(item_id)
        elif item_id not in order and previous in {"", "root", *order}:
            conversation.insert(_message(id=item_id), previous_id=previous or None)
            order.insert(
                len(order) if not previous else 0 if previous == "root" else order.index(previous) + 1, item_id
            )
        assert [each.key for each in conversation.items] == order
        assert conversation.last_id == (order[-1] if order else None)
    assert conversation._size_bytes == sum(map(items._size_bytes, conversation.items))


def test_an_insertion_does_not_visit_other_items(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, measured, measure = Conversation(), list[object](), items._size_bytes
    for _ in range(1000):
        conversation.insert(_message())

    def observed(value: object) -> int:
        measured.append(value)
        return measure(value)

    monkeypatch.setattr(items, "_size_bytes", observed)
    conversation.insert(_message())
    conversation.insert(_message(), previous_id="root")
    assert len(measured) < 50


def test_an_item_cannot_be_the_root() -> None:
    with pytest.raises(InvalidRequestError, match="root"):
        Conversation().insert(_message(id="root"))


def test_a_conversation_has_a_maximum_of_items() -> None:
    conversation = Conversation()
    with pytest.raises(StagemeshError, match="items"):
        for _ in range(5_000):
            conversation.insert(_message())
