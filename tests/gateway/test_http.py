"""Requests of all kinds of HTTP clients: kept connections, HEAD, compressed bodies, web pages and health checks."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
import websockets

from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway import connections
from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.service import create_app
from tests.client.scripted import admitted, ended, finished
from tests.gateway.attacks import answer_of, attacked, connected, exchange, head, json_head, longest_block_s, post
from tests.gateway.making import REALTIME, error_of
from tests.rpc.call_errors import raises

PROMPT = json.dumps({"model": "p", "prompt": "x"}).encode()
APP = "https://app.example:8443"


async def test_a_connection_waits_longer_for_a_request_than_for_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.2)
    async with attacked() as (_, address), connected(address) as (reader, writer), asyncio.timeout(20):
        for _ in range(2):
            writer.write(head("GET", "/health"))
            assert (await answer_of(reader)).status == 200
            await asyncio.sleep(0.5)
        writer.write(b"GET /health")
        assert await reader.read() == b""


@pytest.mark.parametrize(("source", "head_s"), [(None, 10.0), ("127.0.0.2", 0.2)])
async def test_a_new_connection_replaces_one_that_waits(
    source: str | None, head_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attacked(max_connections=1) as (_, address), connected(address) as (reader, writer), asyncio.timeout(20):
        writer.write(head("GET", "/health"))
        assert (await answer_of(reader)).status == 200
        # One of another host is kept for a time.
        assert (await exchange(address, head("GET", "/health"), source="127.0.0.3")).status == 0
        monkeypatch.setattr(connections, "_HEAD_S", head_s)
        while (await exchange(address, head("GET", "/health"), source=source)).status == 0:
            await asyncio.sleep(0.05)
        assert await reader.read() == b""


@pytest.mark.parametrize("path", ["/", "/health", "/assets/page.css", "/v1/models", "/v1/models/p", "/v1/audio/voices"])
async def test_head_has_the_headers_of_get(path: str) -> None:
    async with attacked() as (_, address), httpx.AsyncClient(base_url=f"http://{address}") as http:
        answers = [await http.request(method, path) for method in ("GET", "HEAD")]
        assert answers[1].content == b""
        assert answers[0].status_code == answers[1].status_code
        assert answers[0].headers["content-length"] == answers[1].headers["content-length"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("//v1/models/p", "/v1/models/{model_id}"),
        ("/v1/nothing", None),
        ("/v2/models", None),
    ],
)
async def test_a_path_without_v1_is_explained(path: str, meant: str | None) -> None:
    async with attacked() as (_, address):
        answer = await exchange(address, json_head(path, 2) + b"{}")
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with websockets.connect(f"ws://{address}/realtime?model=p"):
                pass
    assert b"; did you mean /v1/realtime?" in (caught.value.response.body or b"")
    assert (answer.status, caught.value.response.status_code) == (404, 404)
    hint = f"; did you mean {meant}? The base URL of a client ends with /v1" if meant else ""
    assert json.loads(answer.text)["error"]["message"] == f"Not Found{hint}"


async def test_a_health_check_by_http_1_0_needs_no_host() -> None:
    async with attacked() as (_, address):
        assert (await exchange(address, b"GET /health HTTP/1.0\r\n\r\n")).status == 200
        assert (await exchange(address, b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n")).status == 403


BODIES: Mapping[str, tuple[bytes, str, int]] = {
    "gzip": (gzip.compress(PROMPT), "gzip", 200),
    "identity": (PROMPT, "identity", 200),
    "a bomb": (gzip.compress(b" " * (256 << 20), 9), "gzip", 413),
    "half": (gzip.compress(PROMPT)[:-9], "gzip", 400),
    "twice": (gzip.compress(PROMPT) * 2, "gzip", 400),
    "another": (PROMPT, "br", 400),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_may_be_compressed_within_its_limit(name: str) -> None:
    content, encoding, status = BODIES[name]
    async with attacked() as (orchestrator, address), longest_block_s() as blocks:
        orchestrator.scripts.append([admitted(), ended(), finished()])
        tracemalloc.start()
        answer = await post(address, "completions", content, **{"content-encoding": encoding})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert answer.status_code == status, answer.text
        assert len(orchestrator.requests) == (status == 200)
    assert peak < 40 << 20
    assert blocks[0] < 0.5


def _preflight(origin: str) -> dict[str, str]:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    return {"Origin": origin, **wanted}


@pytest.mark.parametrize(
    ("method", "headers", "content", "status", "allowed"),
    [
        ("OPTIONS", _preflight(APP), None, 200, APP),
        ("OPTIONS", _preflight("https://evil.example"), None, 400, None),
        ("POST", {"Origin": APP, "Sec-Fetch-Site": "cross-site"}, PROMPT, 200, APP),
        ("POST", {"Origin": APP}, b"{}", 400, APP),
        ("POST", {"Origin": "https://app.example"}, PROMPT, 403, None),
    ],
)
async def test_pages_of_named_origins_may_call(
    method: str, headers: dict[str, str], content: Any, status: int, allowed: str | None
) -> None:
    async with attacked(cors_origins=[APP]) as (orchestrator, address), httpx.AsyncClient() as http:
        orchestrator.scripts.append([admitted(), ended(), finished()])
        headers["Content-Type"] = "application/json"
        answer = await http.request(method, f"http://{address}/v1/completions", headers=headers, content=content)
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, allowed)


async def test_origins_are_foreign_unless_they_are_named() -> None:
    async with attacked() as (_, address), httpx.AsyncClient() as http:
        answer = await http.options(f"http://{address}/v1/completions", headers=_preflight(APP))
        error_of(answer, 405)
        with pytest.raises(websockets.InvalidStatus):
            await websockets.connect(f"ws://{address}{REALTIME}", origin=websockets.Origin(APP))
    async with attacked(cors_origins=[APP]) as (_, address):
        await (await websockets.connect(f"ws://{address}{REALTIME}", origin=websockets.Origin(APP))).close()


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://App.example", "*.example", "null"])
def test_a_malformed_origin_is_an_error_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        GatewayConfig("127.0.0.1:0", [["127.0.0.1:1"]], cors_origins=[origin])


def test_all_origins_need_tokens() -> None:
    with raises(InvalidRequestError, reason="INVALID_CONFIG", match="cors_origins"):
        create_app(GatewayConfig("127.0.0.1:0", [["127.0.0.1:1"]], cors_origins=["*"]))
