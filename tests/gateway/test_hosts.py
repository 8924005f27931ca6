"""Requests for other hosts, and requests from foreign web pages."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.config import load_config
from stagemesh.gateway.config import GatewayConfig
from tests.client.scripted import admitted, ended, finished
from tests.gateway.attacks import FORM_PATHS, JSON_PATHS, attacked, exchange, head, json_head, upgrade
from tests.rpc.call_errors import raises

OWN = ("localhost", "LocalHost.", "127.0.0.1:9", "[::1]:8000", "[0:0::1]", "ai.example", "AI.example.:443")
OTHER = (
    *("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", "192.168.0.1", ""),
    *("localhost:x", "2130706433", None),
)


@pytest.mark.parametrize("host", [*OWN, *OTHER])
async def test_a_request_for_another_host_is_rejected(host: str | None) -> None:
    async with attacked(hosts=["Ai.Example."]) as (_, address):
        for path in ("/v1/models", "/", "/health"):
            status = (await exchange(address, head("GET", path, host=host))).status
            assert status == (200 if host in OWN else 403), path
        # Two hosts are none.
        twice = await exchange(address, head("GET", "/", [("Host", "localhost")], host=host or ""))
        assert twice.status in {400, 403}


async def test_a_gateway_that_listens_everywhere_accepts_addresses_and_no_names() -> None:
    async with attacked(everywhere=True) as (_, address):
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
    foreign = FOREIGN[name]
    async with attacked(voices=str(tmp_path)) as (_, address):
        for path in (*JSON_PATHS, *FORM_PATHS):
            assert (await exchange(address, json_head(f"/v1/{path}", 1000, foreign))).status == 403, path
        assert (await exchange(address, head("DELETE", "/v1/videos/x", foreign))).status == 403
        for path in ("realtime?model=p", "audio/speech/stream?model=p"):
            # The server itself answers 400 to several origins.
            assert (await exchange(address, upgrade(f"/v1/{path}", foreign))).status in {400, 403}, path
        rebound = upgrade("/v1/realtime?model=p", [("Origin", "http://evil.example")], host="evil.example")
        assert (await exchange(address, rebound)).status == 403


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://ai.example", "HTTP://AI.EXAMPLE."])
async def test_the_own_page_may_change_things(origin: str) -> None:
    async with attacked(hosts=["ai.example"]) as (orchestrator, address):
        orchestrator.scripts.append([admitted(), ended(), finished()])
        content = b'{"model": "p", "prompt": "x"}'
        headers = [("Origin", origin), ("Sec-Fetch-Site", "same-origin")]
        request = json_head("/v1/completions", len(content), headers, host="localhost:8000")
        assert (await exchange(address, request + content)).status == 200


BAD_HOSTS = ("", "https://ai.example", "ai.example:443", "*", "*.example", "a b", "a/b", "::1", None)


@pytest.mark.parametrize("hosts", [[], *([each] for each in BAD_HOSTS), "ai"])
def test_a_malformed_list_of_hosts_is_an_error_at_the_start(hosts: object, tmp_path: Path) -> None:
    config = {"listen": "127.0.0.1:0", "servers": [["127.0.0.1:1"]], "hosts": hosts}
    (tmp_path / "gateway.json").write_text(json.dumps(config))
    with raises(InvalidRequestError, reason="INVALID_CONFIG", match="hosts"):
        load_config(GatewayConfig, tmp_path / "gateway.json")
