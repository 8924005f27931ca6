"""The real speech pipeline as three stage processes, transcribed with Whisper."""

import base64
import io
import json
import subprocess
import sys
import wave
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
import websockets
from playwright.async_api import Page, expect

from stagemesh.client import AudioChunk, Result, StageArguments, Text, WavWriter
from stagemesh.client.responses import ResultBuilder
from stagemesh.common.errors import InvalidRequestError
from tests.deployment import Deployment, eventually
from tests.gateway.making import client, gateway
from tests.gateway.page import visiting
from tests.gateway.talking import Talker
from tests.orchestrator.mesh import poll
from tests.repository.code_blocks import read_blocks
from tests.rpc.call_errors import raises
from tests.speech.whisper import transcribe, word_error_rate
from tests.traces import TraceReceiver, check_whole, chunks_of, last_trace

pytestmark = [pytest.mark.speech, pytest.mark.timeout(600)]

PROMPTS = (
    "Why is the sea salty? Answer in three short sentences.",
    "Describe a walk in the forest in two sentences.",
    "Tell me what a bicycle is, briefly.",
)
TOPICS = ("river", "castle", "garden", "mountain", "kitchen", "library", "desert", "forest")
SEED = 7
MAX_TOKENS = 70
RATE_HZ = 24_000
"""The sample rate of what the gateway sends."""
SPOKEN = "The quick brown fox jumps over the lazy dog. It was a bright day in the garden."


def _ask(up: Deployment, prompt: str, *, seed: int = SEED, max_tokens: int = MAX_TOKENS) -> Result:
    with up.client() as client:
        return client.generate(prompt, seed=seed, max_tokens=max_tokens).result()


@pytest.fixture(scope="module")
def url(speech_up: Deployment) -> Iterator[str]:
    with gateway(speech_up.endpoint) as url:
        yield url


def _samples(pcm: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(pcm, np.int16).astype(np.float32) / np.float32(32768)


def _check_speech(samples: npt.NDArray[np.float32], sample_rate_hz: int, said: str) -> None:
    """Checks that Whisper transcribes audio as what was said, with few errors."""
    heard = transcribe(samples, sample_rate_hz)
    assert word_error_rate(said, heard) <= 0.10, f"said {said!r}, heard {heard!r}"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_whisper_transcribes_the_thinkers_text(speech_up: Deployment, prompt: str) -> None:
    result = _ask(speech_up, prompt)
    assert len(result.text.split()) >= 10
    _check_speech(result.audio, result.sample_rate_hz, result.text)


def test_every_edge_uses_the_configured_connector(speech_up: Deployment) -> None:
    edges = _ask(speech_up, PROMPTS[2], max_tokens=20).finished.edges
    assert {edge.edge: edge.connector for edge in edges} == {"thinker->acoustic": "shm", "acoustic->vocoder": "grpc"}


def test_measured_chunks_and_one_whole_chunk_make_the_same_audio(speech_up: Deployment) -> None:
    first = _ask(speech_up, PROMPTS[2], max_tokens=20)
    acoustic, vocoder = speech_up.load("acoustic-0"), speech_up.load("vocoder-0")
    assert all(0 < interval_s < 1 for interval_s in acoustic.playout.frame_intervals_s.values())
    assert 16 in {cost.frames for cost in vocoder.playout.call_costs}
    assert vocoder.playout.frame_audio_s == pytest.approx(0.0125, rel=0.1)
    with speech_up.client() as client:
        for chunk in (16, 64, "whole"):
            stages: dict[str, StageArguments] = {"vocoder": {"chunk": chunk}}
            result = client.generate(PROMPTS[2], seed=SEED, max_tokens=20, stages=stages).result()
            assert result.audio.tobytes() == first.audio.tobytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, npt.NDArray[np.float32]]:
    """Returns the text and audio of the same parts in one process, without services."""
    folder = tmp_path_factory.mktemp("alone")
    limits = ["--seed", str(SEED), "--max-tokens", str(MAX_TOKENS)]
    command = [sys.executable, "-m", "benchmarks.local", PROMPTS[0], *limits, "--into", str(folder)]
    subprocess.run(command, capture_output=True, timeout=200, check=True)
    return (folder / "text.txt").read_text(), np.load(folder / "audio.npy")


def test_audio_equals_that_of_one_process(
    speech_up: Deployment, alone: tuple[str, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    served = _ask(speech_up, PROMPTS[0])
    assert served.text == alone[0]
    for name, samples in (("served.wav", served.audio), ("alone.wav", alone[1])):
        with WavWriter(tmp_path / name) as wav:
            wav.write(samples, sample_rate_hz=served.sample_rate_hz)
    assert (tmp_path / "served.wav").read_bytes() == (tmp_path / "alone.wav").read_bytes()


def test_first_audio_arrives_while_the_thinker_writes(speech_up: Deployment) -> None:
    with speech_up.client() as client:
        events = list(client.generate(PROMPTS[0], seed=SEED, max_tokens=MAX_TOKENS))
    audio_events = [number for number, event in enumerate(events) if isinstance(event, AudioChunk)]
    texts = [number for number, event in enumerate(events) if isinstance(event, Text)]
    assert audio_events[0] < texts[-1]


def test_eight_concurrent_requests_each_speak_their_own_text(speech_up: Deployment) -> None:
    with ThreadPoolExecutor(8) as pool:
        prompts = [f"Describe a {topic} in one sentence." for topic in TOPICS]
        results = list(pool.map(lambda prompt: _ask(speech_up, prompt, max_tokens=40), prompts))
    heard = [transcribe(result.audio, result.sample_rate_hz) for result in results]
    for result, words in zip(results, heard, strict=True):
        assert word_error_rate(result.text, words) <= 0.5, f"said {result.text!r}, heard {words!r}"
    assert word_error_rate(" ".join(result.text for result in results), " ".join(heard)) <= 0.10
    eventually(speech_up.idle, timeout_s=10)


def test_a_request_is_one_trace_with_each_chunk_and_call(speech_up: Deployment, speech_traces: TraceReceiver) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda prompt: _ask(speech_up, prompt, max_tokens=20), PROMPTS[:2]))
    result = _ask(speech_up, PROMPTS[2], max_tokens=20)
    own, spans = last_trace(speech_traces)
    check_whole(own, spans)
    assert chunks_of(spans) == {edge.edge: edge.chunks for edge in result.finished.edges}
    calls = Counter(process for process, span in spans if span.name == "call")
    assert calls["thinker-0"] == result.finished.stages["thinker"].usage.engine_steps
    assert calls["acoustic-0"] > 1
    assert calls["vocoder-0"] > 1
    linked = [span for _, span in speech_traces.all_spans if span.name == "call" and span.links]
    assert linked, "no call was made for both of the requests that ran together"


def test_disconnected_client_leaves_no_work(speech_up: Deployment) -> None:
    with speech_up.client() as client:
        for event in client.generate(PROMPTS[0], seed=SEED, max_tokens=200):
            if isinstance(event, AudioChunk):
                break
        assert isinstance(event, AudioChunk)
    eventually(speech_up.idle, timeout_s=10)


@pytest.mark.parametrize("victim", ["thinker", "acoustic", "vocoder"])
def test_killed_stage_leaves_no_gap_in_audio(speech_up: Deployment, speech_traces: TraceReceiver, victim: str) -> None:
    first, gathered = speech_up.process_id(f"{victim}-0"), ResultBuilder()
    with speech_up.client() as client:
        events = iter(client.generate(PROMPTS[0], seed=SEED, max_tokens=MAX_TOKENS))
        for event in events:
            gathered.add(event)
            if isinstance(event, AudioChunk):
                speech_up.kill(f"{victim}-0")
                break
        for event in events:
            gathered.add(event)
    own, spans = last_trace(speech_traces)
    check_whole(own, spans)
    assert f"recovery of {victim}" in {span.name for _, span in spans}
    speech_up.wait(lambda up: up.all_ready() and not up.runs(f"{victim}-0", first))
    result = gathered.build()
    _check_speech(result.audio, result.sample_rate_hz, result.text)


@pytest.mark.parametrize(("prompt", "reason"), [("", "EMPTY_PROMPT"), ("word " * 3000, "PROMPT_TOO_LONG")])
def test_invalid_prompts_are_rejected_with_a_reason(speech_up: Deployment, prompt: str, reason: str) -> None:
    with raises(InvalidRequestError, reason=reason):
        _ask(speech_up, prompt)
    eventually(speech_up.idle, timeout_s=10)


def test_the_gateway_streams_text_and_speech(speech_up: Deployment, url: str) -> None:
    with speech_up.client() as own, client(url) as ai:
        expected = own.generate(messages=[("user", PROMPTS[2])], seed=SEED, max_tokens=20).result()
        stream = ai.chat.completions.create(
            model="speech",
            messages=[{"role": "user", "content": PROMPTS[2]}],
            seed=SEED,
            max_completion_tokens=20,
            logprobs=True,
            top_logprobs=2,
            modalities=["text", "audio"],
            extra_body={"audio": {"format": "pcm16"}},
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks if chunk.choices]
    parts = [delta["audio"] for delta in deltas if "audio" in delta]
    assert "".join(part.get("transcript", "") for part in parts) == expected.text
    samples = _samples(b"".join(base64.b64decode(part.get("data", "")) for part in parts))
    assert len(samples) / RATE_HZ == pytest.approx(len(expected.audio) / expected.sample_rate_hz, abs=0.01)
    _check_speech(samples, RATE_HZ, expected.text)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.content or ()]
    assert "".join(each.token for each in tokens).startswith(expected.text)
    assert all(len(each.top_logprobs) == 2 for each in tokens)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert next(choice.finish_reason for choice in choices if choice.finish_reason) == "length"


def test_the_gateway_speaks_a_text_as_it_is(url: str) -> None:
    with client(url) as ai:
        file = ai.audio.speech.create(model="speech", voice=None, input=SPOKEN, response_format="wav")  # type: ignore[arg-type]
    with wave.open(io.BytesIO(file.content)) as audio:
        _check_speech(_samples(audio.readframes(1 << 30)), audio.getframerate(), SPOKEN)


def test_the_gateway_answers_in_the_form_of_a_schema(url: str) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    with client(url) as ai:
        answer = ai.chat.completions.create(
            model="speech",
            messages=[{"role": "user", "content": "Name a colour as JSON."}],
            response_format=form,
            max_tokens=30,
        )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in {"red", "blue"}


def test_the_examples_of_the_gateway_run(url: str, tmp_path: Path) -> None:
    blocks = [each for each in read_blocks("docs/gateway.md") if each.language == "python" and not each.is_fragment]
    first, realtime = (each.code for each in blocks)

    def run(code: str) -> str:
        command = [sys.executable, "-c", code.replace("http://127.0.0.1:8000", url)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120).stdout

    assert len(run(first)) > 50
    *transcript, summary = run(realtime).splitlines()
    with wave.open(str(tmp_path / "calm.wav")) as audio:
        assert audio.getnframes() > audio.getframerate()
    assert "".join(transcript).strip()
    assert float(summary.split(" ")[0]) > 1


async def test_a_realtime_response_is_spoken(url: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as ai,
        ai.realtime.connect(model="speech") as it,
    ):
        talker = Talker(it)
        await talker.until("session.created")
        await talker.update(seed=SEED, max_output_tokens=40)
        await talker.say(PROMPTS[2])
        response = await talker.respond()
    deltas = [event["delta"] for event in talker.received if event["type"] == "response.output_audio.delta"]
    samples = _samples(b"".join(map(base64.b64decode, deltas)))
    _check_speech(samples, RATE_HZ, response["output"][0]["content"][0]["transcript"])


async def test_the_gateway_speaks_a_text_while_it_is_written(speech_up: Deployment, url: str) -> None:
    words = SPOKEN.split()
    with speech_up.client() as client, client.converse(input_mode="stream", outputs=["audio"], seed=SEED) as session:
        for word in words:
            session.append(f"{word} ")
        session.commit()
        chunks = [each for each in session.answer() if isinstance(each, AudioChunk)]
    expected_s = sum(len(each.samples) / each.sample_rate_hz for each in chunks)
    address = f"{url.replace('http', 'ws')}/v1/audio/speech/stream?model=speech&seed={SEED}"
    async with websockets.connect(address, max_size=None) as socket:
        for word in words:
            await socket.send(json.dumps({"type": "input.text", "text": f"{word} "}))
        await socket.send(json.dumps({"type": "input.done"}))
        pcm = b""
        while isinstance(frame := await socket.recv(), bytes) or json.loads(frame)["type"] != "audio.done":
            pcm += frame if isinstance(frame, bytes) else b""
    samples = _samples(pcm)
    assert len(samples) / RATE_HZ == pytest.approx(expected_s, abs=0.01)
    _check_speech(samples, RATE_HZ, SPOKEN)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_of_the_gateway_speaks_and_is_interrupted(url: str, page: Page) -> None:
    await page.goto(url)
    await visiting.send(page, "Tell me everything about the sea.")

    async def is_heard() -> bool:
        return await visiting.samples(page, "heard") > RATE_HZ // 2

    await poll(is_heard, until=bool, timeout_s=40)
    await page.keyboard.press("Escape")
    await expect(visiting.answer(page).get_by_text("Interrupted")).to_be_visible()
    assert RATE_HZ // 2 < await visiting.samples(page, "heard") < await visiting.samples(page, "received")
    assert await visiting.answer(page).locator(".text").inner_text()
    await page.close()
