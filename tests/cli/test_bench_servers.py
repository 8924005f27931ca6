import asyncio
import base64
import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.errors import ExitCode, InternalError, OverloadedError
from stagemesh.common.process.settings import variables
from tests.cli.commands import COMMAND, stagemesh, start
from tests.client.scripted import Pause, Script, ScriptedOrchestrator, admitted, audio, finished, text
from tests.deployment import Deployment, deployed_for_module
from tests.gateway.making import gateway, making
from tests.gateway.sounds import wav
from tests.system.pipelines import pipeline_file

PIPELINE = """
pipeline: spoken
stages:
  source: {engine: fake, function: source, options: {steps: 5, first_step_s: 0.3, step_s: 0.1, size_bytes: 30}}
  frames: {engine: fake, function: frames}
  sound: {engine: fake, function: sound}
edges: [{from: source, to: frames}, {from: frames, to: sound}]
outputs: {text: source, audio: sound}
limits: {max_in_flight: 4, max_queued: 2}
"""
SCRIPT = [admitted(), text("Hi "), audio([0.0] * 2400), text("you"), finished()]
CHAT = ["--model", "m", "--requests", "2"]


spoken = deployed_for_module(lambda folder: pipeline_file(folder, PIPELINE))
"""A pipeline whose text takes 0.3 + 4 * 0.1 seconds, and in which each text is spoken for 10 ms."""


@pytest.fixture(scope="module")
def spoken_url(spoken: Deployment) -> Iterator[str]:
    with gateway(spoken.endpoint) as url:
        yield url


async def measure(*arguments: str) -> Sequence[dict[str, Any]]:
    """Runs the command, and returns the results of each load."""
    loads: Sequence[dict[str, Any]] = json.loads((await stagemesh("bench", *arguments, "--json", "-")).output)["loads"]
    return loads


def check_known_delays(load: dict[str, Any], *, has_text: bool) -> None:
    """Checks the figures of the pipeline against the options of its stages. A busy machine may be slower."""
    figures = load["figures"]
    assert load["errors"] == {}
    assert 0.29 <= figures["ttfa_s"]["p50"] < 1
    assert 0.69 <= figures["e2e_s"]["p50"] < 2
    assert figures["inter_chunk_s"]["mean"] == pytest.approx(0.1, rel=0.3)
    assert figures["audio_s"]["mean"] == pytest.approx(0.05)
    # Each of the four later chunks arrives 0.1 s after the one before, which plays for 10 ms.
    assert figures["total_underrun_s"]["mean"] == pytest.approx(0.36, rel=0.3)
    assert 0.08 <= figures["worst_underrun_s"]["mean"] <= figures["total_underrun_s"]["mean"]
    assert load["c50"] == 0
    assert figures["rtf"]["p50"] == pytest.approx(figures["e2e_s"]["p50"] / 0.05, rel=0.01)
    if has_text:
        assert 0.29 <= figures["ttft_s"]["p50"] <= figures["ttfa_s"]["p50"] + 0.05
        assert figures["inter_token_s"]["mean"] == pytest.approx(0.1, rel=0.3)
        assert figures["output_tokens"]["mean"] == 150


async def test_a_pipeline_has_the_delays_of_its_stages(spoken: Deployment) -> None:
    (load,) = await measure("--server", spoken.endpoint, "--requests", "3")
    check_known_delays(load, has_text=True)


async def test_a_spoken_chat_has_the_delays_of_its_stages(spoken_url: str) -> None:
    chat = ["--model", "spoken", "--modalities", "text,audio", "--requests", "3"]
    (load,) = await measure("--openai", spoken_url, *chat)
    check_known_delays(load, has_text=True)


async def test_speech_has_the_delays_of_its_stages(spoken_url: str) -> None:
    (load,) = await measure("--openai", spoken_url, "--model", "spoken", "--endpoint", "speech", "--requests", "3")
    check_known_delays(load, has_text=False)
    assert "ttft_s" not in load["figures"]


async def test_a_sweep_measures_each_load(spoken: Deployment, tmp_path: Path) -> None:
    one, four = await measure(
        *("--server", spoken.endpoint, "--concurrency", "1,4", "--requests", "4", "--warmup", "2"),
        *("--limit", "e2e=10", "--plot", str(tmp_path / "sweep.png")),
    )
    assert [one["load"]["concurrency"], four["load"]["concurrency"]] == [1, 4]
    assert [one["requests"], four["requests"]] == [4, 4]
    assert four["throughput"]["requests_per_s"] > 2 * one["throughput"]["requests_per_s"]
    assert four["goodput"]["share"] == 1
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


async def test_rejected_requests_are_counted(spoken: Deployment, spoken_url: str) -> None:
    burst = ["--rate", "1000", "--arrivals", "burst", "--burst", "12", "--requests", "12", "--limit", "e2e=10"]
    for target in (["--server", spoken.endpoint], ["--openai", spoken_url, "--model", "spoken"]):
        (load,) = await measure(*target, *burst)
        # Four run, and two wait.
        assert load["errors"] == {"ADMISSION_LIMIT": 6}
        assert load["goodput"]["share"] == 0.5
        assert load["figures"]["e2e_s"]["count"] == 6


async def test_a_mix_in_which_some_requests_fail(tmp_path: Path) -> None:
    mix = tmp_path / "mix.jsonl"
    mix.write_text('{"prompt": "hello", "weight": 2}\n{"prompt": "please fail", "weight": 1}\n')
    common = ["--requests-file", str(mix), "--requests", "12", "--concurrency", "2", "--seed", "1"]
    with making(tmp_path) as up, gateway(up.endpoint) as url:
        (direct,) = await measure("--server", up.endpoint, "--outputs", "text", *common)
        (chat,) = await measure("--openai", url, "--model", "maker", *common)
    assert direct["requests"] == 12
    assert 0 < sum(direct["errors"].values()) < 12
    # The same seed sends the same requests, and the gateway reports the same reasons.
    assert chat["errors"] == direct["errors"]


async def test_errors_of_requests_do_not_end_the_run(orchestrator: ScriptedOrchestrator) -> None:
    errors: list[Script] = [[OverloadedError("full")], [admitted(), text("a"), InternalError("a defect")]]
    orchestrator.scripts.extend([SCRIPT, *errors, SCRIPT])
    (load,) = await measure("--server", orchestrator.endpoint, "--requests", "6", "--prompt", "a", "--max-tokens", "3")
    assert load["requests"] == 6
    assert load["errors"] == {"OVERLOADED": 1, "INTERNAL": 1}
    assert load["throughput"]["audio_s_per_s"] * load["seconds"] == pytest.approx(0.4)
    assert orchestrator.requests[0].parameters.sampling.max_tokens == 3
    assert len({request.parameters.seed for request in orchestrator.requests[1:]}) == 6


async def test_the_table_names_figures_and_errors(orchestrator: ScriptedOrchestrator, tmp_path: Path) -> None:
    orchestrator.scripts.extend([SCRIPT, [OverloadedError("full")], SCRIPT])
    path = tmp_path / "new" / "out.json"
    ran = await stagemesh("bench", "--server", orchestrator.endpoint, "--requests", "3", "--json", str(path))
    parts = ("concurrency 1: 3 requests", "1 failed", "1 OVERLOADED: full", "time to first audio", "p99", "C50: 100.0%")
    assert [part for part in parts if part not in ran.output] == []
    document = json.loads(path.read_text())
    assert (document["target"], document["loads"][0]["requests"]) == (orchestrator.endpoint, 3)


async def test_an_interrupted_run_prints_what_was_measured(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.extend([SCRIPT, SCRIPT, SCRIPT, [admitted(), Pause.FOREVER]])
    process = await start("bench", "--server", orchestrator.endpoint, "--duration", "60", "--json", "-")
    async with asyncio.timeout(30):
        while len(orchestrator.requests) < 4:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED, stderr
    assert json.loads(stdout)["loads"][0]["requests"] == 2


async def test_a_wrong_server_is_one_error_at_the_start(spoken: Deployment, spoken_url: str) -> None:
    assert (await stagemesh("bench", "--server", "127.0.0.1:1")).exit_code == ExitCode.UNAVAILABLE
    no_http = await stagemesh("bench", "--openai", "http://127.0.0.1:1", "--model", "spoken")
    assert (no_http.exit_code, no_http.stderr.count("error:")) == (ExitCode.UNAVAILABLE, 1)
    unknown = await stagemesh("bench", "--openai", spoken_url, "--model", "other")
    unknown.check(ExitCode.NOT_FOUND, "has no model 'other'; set --model to one of spoken")
    output = await stagemesh("bench", "--server", spoken.endpoint, "--outputs", "image")
    output.check(ExitCode.USAGE, "unknown output 'image'")


def sse(*documents: object) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in documents)


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields}]}


DONE = b"data: [DONE]\n\n"


@contextmanager
def http_server(answer: bytes, *, status: int = 200, key: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serves a list with the model "m", and the same answer to each POST. Yields the URL and the received bodies."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            accepted = not key or self.headers["Authorization"] == f"Bearer {key}"
            self._send(*((200, b'{"data": [{"id": "m"}]}') if accepted else (401, b'{"error": {"message": "no"}}')))

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send(status, answer)

        def _send(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name in the base class

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


async def test_audio_of_vllm_omni_is_measured() -> None:
    half_a_second = base64.b64encode(wav(np.zeros(4_000, np.float32), rate_hz=8_000)).decode()
    spoken = {**delta(content=half_a_second), "modality": "audio"}
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    answer = sse(delta(role="assistant", content=""), delta(content="Hi"), spoken, spoken, usage) + DONE
    with http_server(answer) as (url, bodies):
        (load,) = await measure("--openai", url, *CHAT, "--modalities", "text,audio", "--option", "voice=alto")
    assert load["figures"]["audio_s"]["mean"] == pytest.approx(1.0)
    assert load["figures"]["output_tokens"]["mean"] == 7
    assert bodies[-1]["audio"] == {"format": "pcm16", "voice": "alto"}
    assert "voice" not in bodies[-1]


async def test_texts_count_as_tokens_if_the_server_reports_none() -> None:
    with http_server(sse(delta(reasoning_content="Hm"), delta(content="Hi"), delta(content="!")) + DONE) as (url, _):
        (load,) = await measure("--openai", f"{url}/v1", *CHAT)
    assert load["figures"]["output_tokens"]["mean"] == 3


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (sse(delta(content="Hi")), 200, "UNAVAILABLE"),
        (sse(delta(content="Hi"), {"error": {"message": "died", "code": "engine_died"}}), 200, "ENGINE_DIED"),
        (b"data: {no\n\n", 200, "MALFORMED_MESSAGE"),
        (sse(delta(audio={"data": "a"})), 200, "MALFORMED_MESSAGE"),
        (b'{"error": {"message": "busy", "code": 503}}', 503, "HTTP_503"),
        (b"<html>", 502, "HTTP_502"),
        (b'{"error": {"message": "full", "code": "overloaded"}}', 429, "OVERLOADED"),
    ],
)
async def test_wrong_answers_are_counted_by_reason(answer: bytes, status: int, reason: str) -> None:
    with http_server(answer, status=status) as (url, _):
        (load,) = await measure("--openai", url, *CHAT)
    assert load["errors"] == {reason: 2}


async def test_an_invalid_request_is_one_error_at_the_start() -> None:
    with http_server(b'{"error": {"message": "voice: it is unknown"}}', status=400) as (url, bodies):
        ran = await stagemesh("bench", "--openai", url, *CHAT)
    ran.check(ExitCode.USAGE, "the server rejects the request: voice: it is unknown (HTTP_400)")
    assert len(bodies) == 1


async def test_the_api_key_is_read_from_the_environment() -> None:
    def bench(url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, "bench", "--openai", url, *CHAT, *arguments]
        environment = variables() | {"OPENAI_API_KEY": "wrong", "MY_KEY": "secret"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    with http_server(sse(delta(content="Hi")) + DONE, key="secret") as (url, _):
        wrong = await asyncio.to_thread(bench, url)
        right = await asyncio.to_thread(bench, url, "--api-key-env", "MY_KEY")
    assert wrong.returncode == ExitCode.USAGE
    assert "rejects the API key: no; set the environment variable that --api-key-env names" in wrong.stderr
    assert right.returncode == 0
