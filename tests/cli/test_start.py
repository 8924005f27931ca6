import json
import subprocess
import sys

import pytest

from stagemesh.common.errors import ExitCode
from stagemesh.common.wire.versions import own_protocol
from tests.cli.commands import invoke, stagemesh
from tests.client.scripted import ScriptedOrchestrator

HEAVY = ("torch", "vllm", "numpy", "grpc", "pydantic")
LIST_HEAVY = f"""
import sys
from stagemesh.cli.app import app
app(["--help"], standalone_mode=False)
print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
"""
IMPORT_ALL = """
import sys
from stagemesh.cli.local import process_display
from stagemesh.cli.pipelines import pipeline_graph
from stagemesh.cli.requests import output_sinks
print("loaded:", [name for name in ("torch", "vllm", "onnxruntime", "scipy") if name in sys.modules])
"""


@pytest.mark.parametrize("program", [LIST_HEAVY, IMPORT_ALL])
def test_no_heavy_package_is_imported(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "loaded: []"


def test_help_lists_the_commands() -> None:
    names = ["up", "serve", "verify", "generate", "cancel", "context", "pipeline", "stages", "models", "demo"]
    shown = invoke("--help").output
    assert [name for name in [*names, "version", "probe-transport"] if name not in shown] == []


def test_a_server_that_does_not_answer_is_not_needed_for_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_SERVER", "127.0.0.1:1")
    assert invoke("version").stdout.startswith("stagemesh 0.")
    document = json.loads(invoke("version", "--json").stdout)
    assert (document["client"]["wire_versions"], document["server"]) == ([1, 1], None)


def test_a_server_whose_version_is_wanted_must_answer() -> None:
    assert invoke("version", "--server", "127.0.0.1:1").exit_code == ExitCode.UNAVAILABLE


async def test_the_version_shows_the_server(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.description.pipeline, orchestrator.description.generation = "speech", "3f1c"
    orchestrator.description.protocol.CopyFrom(own_protocol())
    ran = await stagemesh("version", "--server", orchestrator.endpoint)
    software = own_protocol().software
    shown = f"server {orchestrator.endpoint}: {software}, wire versions 1 to 1, pipeline speech 3f1c"
    assert ran.stdout.splitlines()[1] == shown
    ran = await stagemesh("version", "--server", orchestrator.endpoint, "--json")
    served = {"software": software, "wire_versions": [1, 1], "features": []}
    assert json.loads(ran.stdout)["server"] == {**served, "pipeline": "speech", "generation": "3f1c"}


def test_an_unknown_command_is_a_usage_error() -> None:
    assert invoke("fly").exit_code == ExitCode.USAGE
