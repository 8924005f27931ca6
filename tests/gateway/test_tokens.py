"""Answers of a gateway to callers without a token."""

from pathlib import Path

import pytest
import websockets

from tests.gateway.attacks import FORM_PATHS, JSON_PATHS, attacked, exchange, head, json_head
from tests.gateway.making import served_with_tokens, serving


async def test_nothing_is_read_before_the_token_is_accepted(tmp_path: Path) -> None:
    async with (
        served_with_tokens(tmp_path, {"secret": "ada"}) as (orchestrator, clients),
        serving(orchestrator.endpoint, tls=clients, voices=str(tmp_path / "v")) as address,
    ):
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
            for path in ("realtime", "responses", "audio/speech/stream"):
                with pytest.raises(websockets.InvalidStatus, match="401"):
                    await websockets.connect(f"ws://{address}/v1/{path}", additional_headers=headers)
        for path in ("/", "/health", "/assets/main.js"):
            assert (await exchange(address, head("GET", path))).status == 200, path
        accepted = [("Authorization", "Bearer secret")]
        assert (await exchange(address, head("GET", "/v1/models", accepted, host="any.name"))).status == 200


async def test_metrics_and_the_schema_are_not_at_the_port_of_callers() -> None:
    async with attacked() as (_, address):
        for path in ("/metrics", "/openapi.json", "/docs", "/redoc"):
            assert (await exchange(address, head("GET", path))).status == 404
