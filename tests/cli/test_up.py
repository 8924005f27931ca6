import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from stagemesh.cli.launcher import Launcher
from stagemesh.cli.local.process_display import make_display
from stagemesh.common.errors import ExitCode
from stagemesh.common.process import settings
from stagemesh.pipeline import load_pipeline
from tests.children import running_process
from tests.cli.commands import COMMAND, run_process, stagemesh
from tests.gateway.sounds import tone, wav
from tests.launcher.processes import ended
from tests.system.added_transforms import add_package

NUMBER = 1000
_MODULE = f"""\
from stagemesh.common.plugins.connectors import ConnectorDescriptor
DESCRIPTOR = ConnectorDescriptor("pigeon", {NUMBER}, 5, "pigeon:Pigeon", module="not_there", remedy="feed it")
"""


def add_connector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs connector "pigeon" for every process that is started after this call."""
    (folder / "pigeon.py").write_text(_MODULE)
    entry_points = "[stagemesh.connectors]\npigeon = pigeon:DESCRIPTOR\n"
    add_package(folder, monkeypatch, name="pigeon", entry_points=entry_points)


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
    command = [*COMMAND, "up", str(pipeline), "--port", "0", "--json", *arguments]
    async with running_process(*command, stdout=asyncio.subprocess.PIPE) as process:
        up = Up(process)
        await up.until_ready()
        yield up


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


async def _gone(process_id: int) -> bool:
    """Whether a process, which is not a child of this one, ends within seconds."""
    return await asyncio.to_thread(ended, process_id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_ends_every_process(tiny: Path, number: signal.Signals) -> None:
    before = _shared_memory()
    async with _up(tiny) as up:
        up.process.send_signal(number)
        assert await up.process.wait() == (0 if number == signal.SIGTERM else -number)
        assert [await _gone(child) for child in up.children.values()] == [True] * 3
    assert _shared_memory() <= before


async def test_ctrl_c_stops_a_gateway_that_has_answered(tiny: Path) -> None:
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


async def test_a_running_pipeline_answers_and_holds_its_port(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_connector(tiny.parent, monkeypatch)
    async with _up(tiny) as up:
        ran = await stagemesh("generate", "hello", "--server", up.endpoint, "--seed", "1")
        shown = await stagemesh("stages", "--server", up.endpoint)
        document = json.loads((await stagemesh("stages", "--server", up.endpoint, "--json")).stdout)
        port = up.endpoint.rpartition(":")[2]
        second = await run_process("up", str(tiny), "--port", port)
        gateway = await run_process("up", str(tiny), "--port", "0", "--gateway", up.endpoint)
    assert (ran.exit_code, ran.stdout.startswith("Step 0 is "), "first->second" in ran.stderr) == (0, True, True)
    assert document["edges"] == up.edges
    shown_links = [line.split()[:5] for line in shown.stdout.splitlines()]
    assert ["first->second", "first-0", "to", "second-0", "shm"] in shown_links
    (link,) = up.edges[0]["links"]
    (refusal,) = link["refusals"]
    assert (link["connector"], refusal["connector"]) == ("CONNECTOR_SHM", NUMBER)
    assert "pigeon" in refusal["error"]["message"]
    for refused, option in ((second, "--port"), (gateway, "--gateway")):
        refused.check(ExitCode.REFUSED, port, option)


def test_the_url_of_a_gateway_is_printed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher(load_pipeline(str(tiny)), listen="127.0.0.1:0", gateway_listen="127.0.0.1:8000")
    make_display(as_json=False).ready(launcher, (), hint="hint", logs=Path("logs"), operator=None)
    assert "OpenAI's API at http://127.0.0.1:8000/v1\n" in capsys.readouterr().err


async def test_a_gateway_without_its_extra_names_the_extra(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny.parent / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    monkeypatch.setenv("PYTHONPATH", str(tiny.parent))
    ran = await run_process("up", str(tiny), "--port", "0", "--gateway", "127.0.0.1:0")
    ran.check(ExitCode.REFUSED, "--gateway needs the module uvicorn; run: pip install 'stagemesh[gateway]'")


async def test_an_unusable_connector_ends_up_with_the_reason(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_connector(tiny.parent, monkeypatch)
    async with asyncio.timeout(30):
        ran = await run_process("up", str(tiny), "--port", "0", "--set", "edges.*.connector=pigeon")
    assert (ran.exit_code, "ready at" in ran.stderr) == (ExitCode.REFUSED, False)
    assert (
        "error: edge first->second from first-0 to second-0: connector pigeon cannot be used with replica" in ran.stderr
    )
    assert "not_there is not installed: feed it; fix that, or set `connector: auto`" in ran.stderr


async def test_the_demo_starts_a_pipeline_runs_a_prompt_and_stops(tiny: Path) -> None:
    ran = await run_process("demo", str(tiny), "--prompt", "hello", "--seed", "1")
    assert (ran.exit_code, ran.stdout.startswith("Step 0 is ")) == (0, True)
    assert "first->second" in ran.stderr


async def test_a_demo_without_the_wanted_audio_fails(tiny: Path) -> None:
    ran = await run_process("demo", str(tiny), "--prompt", "hello", "--audio", str(tiny.parent / "a.wav"))
    ran.check(1, "no audio")
