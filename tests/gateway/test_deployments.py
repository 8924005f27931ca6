"""The gateway of orchestrators that are busy, unreachable or protected, and callers that leave."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import openai
import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import AsyncClient
from stagemesh.common.errors import UnavailableError
from stagemesh.gateway.catalog import Catalog
from stagemesh.gateway.config import Aliases
from stagemesh.v1.orchestrator_pb2 import DescribePipelineResponse
from tests.client.scripted import admitted, ended, finished, text
from tests.deployment import Deployment, deployed_for_module, eventually
from tests.gateway.making import ask, asking, client, configured_gateway, error_of, gateway, served_with_tokens
from tests.system.pipelines import pipeline_file

SLOW = """
pipeline: slow
stages: {source: {engine: fake, function: source, options: {steps: 500, step_s: 0.02}}}
outputs: {text: source}
limits: {max_in_flight: 2, max_queued: 0}
"""


up = deployed_for_module(lambda folder: pipeline_file(folder, SLOW))


@pytest.fixture(scope="module")
def url(up: Deployment) -> Iterator[str]:
    with gateway(up.endpoint) as url:
        yield url


def _body(*, stream: bool) -> dict[str, object]:
    return {"model": "slow", "messages": [{"role": "user", "content": "go"}], "stream": stream}


def _running(up: Deployment) -> int:
    return up.load("source-0").running


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_leaves_cancels_its_request(up: Deployment, url: str, stream: bool) -> None:
    with httpx.Client() as http:
        if stream:
            with http.stream("POST", f"{url}/v1/chat/completions", json=_body(stream=True)) as answer:
                lines = answer.iter_lines()
                next(lines)
                eventually(lambda: _running(up) == 1, timeout_s=10)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{url}/v1/chat/completions", json=_body(stream=False), timeout=0.5)
    eventually(up.idle, timeout_s=10)


def test_a_full_pipeline_asks_to_retry(up: Deployment, url: str) -> None:
    with httpx.Client() as http:
        request = http.build_request("POST", f"{url}/v1/chat/completions", json=_body(stream=True))
        streams = [http.send(request, stream=True) for _ in range(2)]
        answer = http.post(f"{url}/v1/chat/completions", json=_body(stream=True), timeout=5)
        assert error_of(answer, 429)["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        for each in streams:
            each.close()
    eventually(up.idle, timeout_s=10)


def test_a_large_body_is_rejected(tmp_path: Path, up: Deployment) -> None:
    config = tmp_path / "gateway.json"
    listen = f"127.0.0.1:{PortPicker().pick()}"
    config.write_text(f'{{"listen": "{listen}", "servers": [["{up.endpoint}"]], "max_body_bytes": 1000}}')
    with configured_gateway(str(config), url=f"http://{listen}") as small:
        for body in (b" " * 2000, iter([b" " * 600] * 3)):
            answer = httpx.post(f"{small}/v1/chat/completions", content=body)
            assert "1000 bytes" in error_of(answer, 413)["message"]
        assert httpx.get(f"{small}/v1/models").json()["data"][0]["id"] == "slow"


def test_an_unreachable_orchestrator_is_unavailable(up: Deployment) -> None:
    dead = f"127.0.0.1:{PortPicker().pick()}"
    with gateway(dead, up.endpoint) as url, client(url) as ai:
        assert [model.id for model in ai.models.list()] == ["slow"]
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as caught:
            ai.models.retrieve("other")
        assert caught.value.status_code == 503
        assert ai.models.retrieve("slow").id == "slow"


async def test_requests_share_the_wait_for_an_orchestrator_that_does_not_answer() -> None:
    class Client:
        def __init__(self, pipeline: str) -> None:
            self.pipeline, self.asked, self.answering = pipeline, 0, asyncio.Event()

        async def describe(self) -> DescribePipelineResponse:
            self.asked += 1
            await self.answering.wait()
            if self.pipeline:
                return DescribePipelineResponse(pipeline=self.pipeline)
            raise UnavailableError("cannot be reached")

    hanging, other = Client(""), Client("p")
    servers = Catalog(cast("list[AsyncClient]", [hanging, other]), None, Aliases())
    waiting = [asyncio.create_task(servers.find("lost")) for _ in range(9)]
    other.answering.set()
    async with asyncio.timeout(5):
        assert (await servers.find("p:a")).adapter == "a"
        await servers.first()
        assert not any(each.done() for each in waiting)
        hanging.answering.set()
        errors = await asyncio.gather(*waiting, servers.find("lost"), return_exceptions=True)
        assert [str(each) for each in errors] == ["cannot be reached"] * 10
    assert (hanging.asked, other.asked) == (1, 1)


async def test_requests_have_the_tokens_of_their_callers(tmp_path: Path) -> None:
    async with served_with_tokens(tmp_path, {"secret": "ada"}) as (orchestrator, clients):
        orchestrator.scripts.append([admitted(), text("hi"), ended(), finished()])
        async with asking(orchestrator, tls=clients, key="secret") as ai:
            assert (await ask(ai)).choices[0].message.content == "hi"
        async with asking(orchestrator, tls=clients, key="wrong") as ai:
            with pytest.raises(openai.AuthenticationError, match="unknown"):
                await ai.models.retrieve("p")
        async with asking(orchestrator, tls=clients) as ai:
            headers = {b"authorization": b"Bearer \xe9"}
            refused = await ai._client.get("http://gateway/v1/models", headers=headers)
            assert "characters" in error_of(refused, 401)["message"]


def test_a_folder_without_certificates_is_an_error_at_the_start(tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("stagemesh"))
    for option, missing in (("--tls", "ca.crt"), ("--https", "tls.crt")):
        command = [program, "gateway", "--listen", "127.0.0.1:0", option, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 2
        assert missing in done.stderr
