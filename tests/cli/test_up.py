import asyncio
import json
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from stagemesh.common.errors import ExitCode
from stagemesh.common.process import settings
from tests.cli.added_connector import NUMBER, add_connector
from tests.cli.commands import COMMAND, stagemesh
from tests.gateway.sounds import tone, wav
from tests.launcher.processes import ended


class Up:
    """A running `stagemesh up --json`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.endpoint = ""
        self.gateway_url = ""
        self.edges: list[dict[str, Any]] = []
        self.children: dict[str, int] = {}

    async def until_ready(self) -> None:
        """Reads events until the event "ready"."""
        while not self.endpoint:
            event = json.loads(await self.next_line())
            if event["event"] == "ready":
                self.endpoint, self.edges = event["endpoint"], event["edges"]
                self.gateway_url = event["gateway_url"]
            elif event["process_id"] is not None:
                self.children[event["name"]] = event["process_id"]

    async def next_line(self) -> bytes:
        """Returns the next line of stdout."""
        assert self.process.stdout is not None
        return await self.process.stdout.readline()


@asynccontextmanager
async def _up(pipeline: Path, *arguments: str) -> AsyncGenerator[Up]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "up", str(pipeline), "--port", "0", "--json", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        up = Up(process)
        await up.until_ready()
        yield up
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


async def _gone(process_id: int) -> bool:
    """Whether a process, which is not a child of this one, ends within seconds."""
    return await asyncio.to_thread(ended, process_id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_everything_cleanly(tiny: Path, number: signal.Signals) -> None:
    before = _shared_memory()
    async with _up(tiny) as up:
        up.process.send_signal(number)
        assert await up.process.wait() == 0
        assert [await _gone(child) for child in up.children.values()] == [True] * 3
    assert _shared_memory() <= before


async def test_killing_up_ends_every_child_process(tiny: Path) -> None:
    before = _shared_memory()
    async with _up(tiny) as up:
        up.process.kill()
        assert [await _gone(child) for child in up.children.values()] == [True] * 3
    assert _shared_memory() <= before


async def test_a_prompt_is_answered_by_a_running_pipeline(tiny: Path) -> None:
    async with _up(tiny) as up:
        ran = await stagemesh("generate", "hello", "--server", up.endpoint, "--seed", "1")
    assert (ran.exit_code, ran.stdout.startswith("Step 0 is ")) == (0, True)
    assert "first->second" in ran.stderr


async def test_a_second_up_on_the_same_port_reports_the_port(tiny: Path) -> None:
    async with _up(tiny) as up:
        port = up.endpoint.rpartition(":")[2]
        ran = await stagemesh("up", str(tiny), "--port", port)
    assert ran.exit_code == ExitCode.REFUSED
    assert port in ran.stderr
    assert "--port" in ran.stderr


async def test_ctrl_c_stops_a_gateway_that_has_answered(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path / "home"))
    async with _up(tiny, "--gateway", "127.0.0.1:0") as up:
        async with openai.AsyncOpenAI(base_url=up.gateway_url, api_key="none", max_retries=0, timeout=30) as client:
            answer = await client.completions.create(model="tiny", prompt="hello", seed=1)
            sample = ("ada.wav", wav(tone(1.5)))
            voice = await client.audio.voices.create(name="ada", audio_sample=sample, consent="form-17")
        up.process.send_signal(signal.SIGINT)
        assert await up.process.wait() == 0
        assert sorted(up.children) == ["first-0", "gateway", "orchestrator", "second-0"]
        assert [await _gone(child) for child in up.children.values()] == [True] * 4
    assert answer.choices[0].text.startswith("Step 0 is ")
    assert (settings.voices_dir() / "everyone" / voice.id).is_dir()


async def test_the_url_of_a_gateway_is_printed(tiny: Path) -> None:
    arguments = ("up", str(tiny), "--port", "0", "--gateway", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while not (line := (await process.stderr.readline()).decode()).startswith("OpenAI's API at "):
                assert line
    finally:
        process.terminate()
        await process.communicate()
    assert re.fullmatch(r"OpenAI's API at http://127\.0\.0\.1:\d+/v1\n", line)


async def test_a_gateway_on_a_port_in_use_reports_its_option(tiny: Path) -> None:
    async with _up(tiny) as up:
        ran = await stagemesh("up", str(tiny), "--port", "0", "--gateway", up.endpoint)
    assert ran.exit_code == ExitCode.REFUSED
    assert up.endpoint.rpartition(":")[2] in ran.stderr
    assert "--gateway" in ran.stderr


async def test_a_gateway_without_its_extra_names_the_extra(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny.parent / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    monkeypatch.setenv("PYTHONPATH", str(tiny.parent))
    ran = await stagemesh("up", str(tiny), "--port", "0", "--gateway", "127.0.0.1:0")
    assert ran.exit_code == ExitCode.REFUSED
    assert "--gateway needs the module uvicorn; run: pip install 'stagemesh[gateway]'" in ran.stderr


async def test_the_connectors_of_edges_are_printed_when_the_pipeline_is_ready(tiny: Path) -> None:
    async with _up(tiny) as up:
        ran = await stagemesh("stages", "--server", up.endpoint)
        document = json.loads((await stagemesh("stages", "--server", up.endpoint, "--json")).stdout)
    assert [(edge["name"], edge["links"][0]["connector"]) for edge in up.edges] == [("first->second", "CONNECTOR_SHM")]
    assert document["edges"] == up.edges
    assert ["first->second", "first-0", "to", "second-0", "shm"] in [line.split() for line in ran.stdout.splitlines()]


async def test_a_fixed_connector_that_cannot_be_used_ends_up_with_the_reason(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_connector(tiny.parent, monkeypatch)
    async with asyncio.timeout(30):
        ran = await stagemesh("up", str(tiny), "--port", "0", "--set", "edges.*.connector=pigeon")
    assert (ran.exit_code, "ready at" in ran.stderr) == (ExitCode.REFUSED, False)
    assert (
        "error: edge first->second from first-0 to second-0: connector pigeon cannot be used with replica" in ran.stderr
    )
    assert "not_there is not installed: feed it; fix that, or set `connector: auto`" in ran.stderr


async def test_better_connectors_are_printed_with_the_reason_against_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_connector(tiny.parent, monkeypatch)
    async with _up(tiny) as up:
        link = up.edges[0]["links"][0]
    (refusal,) = link["refusals"]
    assert (link["connector"], refusal["connector"]) == ("CONNECTOR_SHM", NUMBER)
    assert "pigeon" in refusal["error"]["message"]


async def test_the_demo_starts_a_pipeline_runs_a_prompt_and_stops(tiny: Path) -> None:
    ran = await stagemesh("demo", str(tiny), "--prompt", "hello", "--seed", "1")
    assert (ran.exit_code, ran.stdout.startswith("Step 0 is ")) == (0, True)
    assert "first->second" in ran.stderr


async def test_a_demo_without_the_wanted_audio_fails(tiny: Path) -> None:
    ran = await stagemesh("demo", str(tiny), "--prompt", "hello", "--audio", str(tiny.parent / "a.wav"))
    assert ran.exit_code == 1
    assert "no audio" in ran.stderr
