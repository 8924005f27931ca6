"""A gateway that the launcher runs next to a pipeline."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from stagemesh.cli.launcher import Launcher, ProcessState, ProcessStatus
from stagemesh.cli.launcher.certificates import Authority
from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.pipeline import load_pipeline
from tests.launcher.test_launcher import LISTEN, Events
from tests.rpc.call_errors import raises


def _launcher(
    pipeline: Path, gateway: str = LISTEN, *, events: Events | None = None, authority: Authority | None = None
) -> Launcher:
    loaded = load_pipeline(str(pipeline))
    return Launcher(loaded, listen=LISTEN, gateway_listen=gateway, listener=events, authority=authority)


@asynccontextmanager
async def _client(launcher: Launcher) -> AsyncGenerator[openai.AsyncOpenAI]:
    url = f"http://{launcher.gateway_endpoint}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


async def _answer(client: openai.AsyncOpenAI) -> str:
    answer = await client.completions.create(model="tiny", prompt="hello", seed=1)
    return answer.choices[0].text


async def test_a_gateway_answers_the_official_client_and_ends_with_the_launcher(tiny: Path) -> None:
    launcher = Launcher(load_pipeline(str(tiny)), listen=LISTEN, gateway_listen=LISTEN, metrics=True)
    async with launcher.running(), _client(launcher) as client:
        await launcher.wait_ready()
        gateway = launcher.processes["gateway"]
        assert gateway.state is ProcessState.READY
        assert launcher.metrics_endpoints["gateway"] == launcher.gateway_endpoint
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await _answer(client)).startswith("Step 0 is ")
    assert gateway.process_id is not None
    assert launcher.processes["gateway"].state is ProcessState.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(gateway.process_id, 0)


async def test_a_killed_gateway_is_restarted_and_serves(tiny: Path) -> None:
    events = Events()
    launcher = _launcher(tiny, events=events)
    async with launcher.running(), _client(launcher) as client:
        await launcher.wait_ready()
        victim = launcher.processes["gateway"].process_id
        assert victim is not None
        os.kill(victim, signal.SIGKILL)

        def is_gateway(status: ProcessStatus, state: ProcessState) -> bool:
            return (status.name, status.state) == ("gateway", state)

        await events.until(lambda status: is_gateway(status, ProcessState.RESTARTING))
        restarted = await events.until(lambda status: is_gateway(status, ProcessState.READY))
        assert restarted.process_id != victim
        assert await _answer(client)


async def test_a_gateway_has_a_certificate_of_its_own(tiny: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    launcher = _launcher(tiny, authority=authority)
    async with launcher.running(), _client(launcher) as client:
        await launcher.wait_ready()
        assert (await _answer(client)).startswith("Step 0 is ")


async def test_the_port_of_a_gateway_in_use_is_reported_before_any_process_starts(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        launcher = _launcher(tiny, f"127.0.0.1:{port}")
        with raises(NotReadyError, reason="PORT_IN_USE", match=f"{port}.*--gateway"):
            async with launcher.running():
                pass
    assert not launcher.processes


async def test_an_address_of_a_gateway_without_a_host_is_rejected(tiny: Path) -> None:
    launcher = _launcher(tiny, "8000")
    with raises(InvalidRequestError, reason="INVALID_ADDRESS", match="write an address such as"):
        async with asyncio.timeout(30), launcher.running():
            pass
