"""A gateway that the launcher runs next to a pipeline."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from cryptography import x509

from stagemesh.cli.launcher import Launcher, ProcessState
from stagemesh.cli.launcher.certificates import Authority
from stagemesh.common.errors import InvalidRequestError
from tests.launcher.test_launcher import LISTEN, Events, make_launcher
from tests.rpc.call_errors import raises


@asynccontextmanager
async def _client(launcher: Launcher) -> AsyncGenerator[openai.AsyncOpenAI]:
    url = f"http://{launcher.gateway_endpoint}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


async def _answer(client: openai.AsyncOpenAI) -> str:
    return (await client.completions.create(model="tiny", prompt="hello", seed=1)).choices[0].text


async def test_a_gateway_answers_the_official_client_and_ends_with_the_launcher(tiny: Path) -> None:
    launcher = make_launcher(tiny, gateway_listen=LISTEN, metrics=True)
    async with launcher.running(), _client(launcher) as client:
        await launcher.wait_ready()
        gateway = launcher.processes["gateway"]
        assert gateway.state is ProcessState.READY
        async with httpx.AsyncClient() as http:
            metrics = await http.get(f"http://{launcher.metrics_endpoints['gateway']}/metrics")
        assert "stagemesh_gateway_requests_total" in metrics.text
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await _answer(client)).startswith("Step 0 is ")
    assert gateway.process_id is not None
    assert launcher.processes["gateway"].state is ProcessState.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(gateway.process_id, 0)


async def test_a_killed_gateway_is_restarted_and_serves(tiny: Path) -> None:
    events = Events()
    launcher = make_launcher(tiny, gateway_listen=LISTEN, listener=events)
    async with launcher.running(), _client(launcher) as client:
        await launcher.wait_ready()
        victim = launcher.processes["gateway"]
        assert (await events.kill(victim)).process_id != victim.process_id
        assert await _answer(client)


async def test_a_gateway_has_a_certificate_of_its_own(tiny: Path, tmp_path: Path) -> None:
    launcher = make_launcher(tiny, gateway_listen=LISTEN, authority=Authority(tmp_path / "authority"))
    async with launcher.running(), _client(launcher) as client:
        await launcher.wait_ready()
        assert (await _answer(client)).startswith("Step 0 is ")


async def test_each_process_has_only_the_names_that_it_needs(tiny: Path, tmp_path: Path) -> None:
    launcher = make_launcher(
        _with_store(tiny, tmp_path / "store"),
        gateway_listen=LISTEN,
        jobs=True,
        authority=Authority(tmp_path / "authority"),
    )
    async with launcher.running() as folder:
        pems = {path.parent.name: path.read_bytes() for path in folder.glob("tls/*/tls.crt")}
    assert {name: _uris(pem) for name, pem in pems.items()} == {
        "launcher": ["stagemesh://operator/launcher", "stagemesh://client/launcher"],
        "orchestrator": ["stagemesh://orchestrator/orchestrator"],
        "media": [],
        "jobs": ["stagemesh://client/jobs"],
        "gateway": ["stagemesh://client/gateway"],
        "first-0": ["stagemesh://stage/first/first-0"],
        "second-0": ["stagemesh://stage/second/second-0"],
    }


def _with_store(pipeline: Path, store: Path) -> Path:
    pipeline.write_text(f"{pipeline.read_text()}media: {{store: {store}}}\n")
    return pipeline


def _uris(pem: bytes) -> list[str]:
    extensions = x509.load_pem_x509_certificate(pem).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)


async def test_an_address_of_a_gateway_without_a_host_is_rejected(tiny: Path) -> None:
    launcher = make_launcher(tiny, gateway_listen="8000")
    with raises(InvalidRequestError, reason="INVALID_ADDRESS", match="write an address such as"):
        async with asyncio.timeout(30), launcher.running():
            pass
