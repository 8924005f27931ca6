"""Requests of all kinds of HTTP clients: kept connections, HEAD, compressed bodies, web pages and health checks."""

import gzip
import json
import tracemalloc
from collections.abc import Mapping

import pytest

from tests.client.scripted import admitted, ended, finished
from tests.gateway.attacks import attacked, longest_block_s, post

PROMPT = json.dumps({"model": "p", "prompt": "x"}).encode()


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
